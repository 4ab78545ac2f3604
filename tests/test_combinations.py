"""Embedding sharding x dense sharding x precision x table type x optimizer x mesh, against a plain program.

A pairwise cover of all settings; `make test-full` runs the full product, with tables of the type that is computed in.
The interaction follows the optimizer.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import plain_step
import pytest
from cover import FULL, cases
from test_step import BASE, DATASET, SCHEMA, B, batch, build, host, start

from jaxrec.embeddings.spec import SHARDINGS
from jaxrec.fsdp import DENSE_SHARDINGS
from jaxrec.mesh import MeshConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.sparse import SPARSE_OPTIMIZERS, SparseOptimizerConfig
from jaxrec.precision import PRECISIONS
from jaxrec.training import setup
from jaxrec.training.step import FIRST_SCALE

STEPS, EPS = 4, 2.0**-2
# (--precision, --table_dtype)
TYPES = [(p, p) for p in PRECISIONS] if FULL else list(itertools.product(PRECISIONS, PRECISIONS))
MESHES = ((1, 1), (8, 1), (1, 8), (2, 4))
INTERACTIONS = ("dot", "cross")
DENSE_RATE, RATE = 0.02, 0.05


def config_of(sharding, dense_sharding, precision, table_dtype, optimizer, mesh):
    interaction = INTERACTIONS[SPARSE_OPTIMIZERS.index(optimizer) % 2]
    sparse = SparseOptimizerConfig(
        optimizer, RATE, EPS, weight_decay=0.125 if optimizer == "momentum" else 0.0, b1=0.75, b2=0.875
    )
    return dataclasses.replace(
        BASE,
        model=dataclasses.replace(BASE.model, dropout=0.0, interaction=interaction),
        optimizer=DenseOptimizerConfig("adagrad", DENSE_RATE, EPS, initial_accumulator=0.01),
        embedding=dataclasses.replace(BASE.embedding, optimizer=sparse, sharding=sharding, dtype=table_dtype),
        mesh=MeshConfig(*mesh),
        precision=precision,
        dense_sharding=dense_sharding,
    )


@pytest.fixture(autouse=True)
def forget():
    """A compiled program takes some hundred memory maps, of which Linux gives a process 65,530."""
    yield
    build.cache_clear()


@functools.cache
def reference(precision: str, interaction: str):
    """Returns the jitted gradients of the plain program, and the structure and names of the dense parameters."""
    made = config_of("replicated", "replicated", precision, "float32", "sgd", (1, 1))
    model = dataclasses.replace(made.model, interaction=interaction)
    program, dense = setup.build_program(dataclasses.replace(made, model=model), DATASET)
    scale = FIRST_SCALE * B if precision == "float16" else 1.0
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(dense)]
    return plain_step.loss_and_gradients(SCHEMA, program.graphdef, 0.7, scale), jax.tree.structure(dense), names


@pytest.mark.parametrize(
    "sharding, dense_sharding, types, optimizer, mesh",
    cases(SHARDINGS, DENSE_SHARDINGS, TYPES, SPARSE_OPTIMIZERS, MESHES),
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)),
)
def test_steps_equal_a_plain_program(sharding, dense_sharding, types, optimizer, mesh):
    precision, table_dtype = types
    config = config_of(sharding, dense_sharding, precision, table_dtype, optimizer, mesh)
    program, state, window, step = start(config)
    # The reference has the same dense model on one device, its gradients scaled as the step's where they would vanish
    # in float16. Its tables are float32 and its updates float64. Each step of it starts from what the program has then:
    # so a difference is one step's, and no ReLU is on another side of 0.
    gradients, structure, names = reference(precision, config.model.interaction)
    sparse, adagrad = config.embedding.optimizer, SparseOptimizerConfig("adagrad", eps=EPS)
    # A product of the dense part is wrong by its operands' rounding, and a weight of a narrow table by one step of its
    # type; what follows from either is of their size.
    unit = max(float(jnp.finfo(precision).eps), float(jnp.finfo(table_dtype).eps))
    exact = unit == jnp.finfo(jnp.float32).eps
    actual = host(program, state)
    dense_slots = {name: {"accumulator": np.full(actual[name].shape, 0.01)} for name in names}
    for k in range(STEPS):
        rate = min(1, (k + 1) / 4)  # The warm-up.
        before, sums = actual, float(window.loss)
        dense = jax.tree.unflatten(structure, [before[name] for name in names])
        tables = {t: before[f"{t} weights"].astype(np.float32) for t in SCHEMA.vocabulary}
        loss, d_dense, d_tables = gradients(dense, tables, batch(k))
        expected = {}
        for name, g in zip(names, jax.tree.leaves(d_dense), strict=True):
            expected[name], dense_slots[name] = plain_step.update(
                adagrad, before[name], np.asarray(g), dense_slots[name], DENSE_RATE * rate, k
            )
        rows = plain_step.touched(SCHEMA, batch(k))
        for t, weights in tables.items():
            parts = {p.removeprefix(f"{t} "): v for p, v in before.items() if p.startswith(f"{t} ")}
            del parts["weights"]
            slots = {p: v.reshape(len(weights), -1) for p, v in parts.items()}
            expected[f"{t} weights"], slots = plain_step.update_touched(
                sparse, weights, d_tables[t], slots, RATE * rate, k, rows[t]
            )
            expected |= {f"{t} {p}": v.reshape(parts[p].shape) for p, v in slots.items()}
        state, window, _ = step(state, window, batch(k))
        assert (int(state.step), int(state.failed_step), int(state.loss_scale.skipped)) == (k + 1, -1, 0)
        loss = float(loss) * batch(k).weight.sum()
        assert abs(float(window.loss) - sums - loss) <= (1e-5 if exact else unit) * loss
        actual = host(program, state)
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            difference = np.abs(actual[name].astype(np.float64) - value)
            size = np.abs(value) + np.abs(value).max()
            bound = 2e-5 * np.abs(value) + 1e-6 if exact else 2 * unit * size
            assert (difference <= bound).all(), (k, name, (difference / bound).max())


def test_the_reference_sees_the_settings():
    """Types that are asked for are those of the arrays."""
    config = config_of("row", "fsdp", "bfloat16", "float16", "adam", (2, 4))
    program, state, *_ = start(config)
    (group,) = program.plan.groups
    assert group.dtype == jnp.float16 and group.name.endswith("_float16")
    assert {str(x.dtype) for x in jax.tree.leaves((state.dense, state.tables[group.name].slots))} == {"float32"}
    assert B % 8 == 0 and DATASET.schema is SCHEMA
