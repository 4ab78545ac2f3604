"""The compiled step's memory: tables are updated in place, and no temporary grows with them.

Nothing is allocated: the programs are compiled for abstract arrays.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from cover import INSTALLED_ENGINES, cases
from flax import nnx

from jaxrec import mesh as mesh_lib
from jaxrec.data.schema import Dataset, FeatureSpec, Schema
from jaxrec.embeddings.plan import make_plan
from jaxrec.embeddings.spec import SHARDINGS, TableSpec
from jaxrec.models.dlrm import DLRMConfig
from jaxrec.optim.dense import DenseOptimizerConfig
from jaxrec.optim.schedule import ScheduleConfig
from jaxrec.optim.sparse import SPARSE_OPTIMIZERS, SparseOptimizerConfig, row_rule
from jaxrec.precision import policy
from jaxrec.training import setup
from jaxrec.training.step import Program, shard_train_step

DIM, BATCH = 8, 64
SMALL, LARGE = 1_000_000, 2_000_000


def compiled(sharding: str, sizes: tuple[int, int], rows: int, dtype: str, engine: str = "xla"):
    """Returns (bytes of the tables on each device, memory analysis) of two tables of `rows` rows per optimizer."""
    features, specs = [], []
    for o in SPARSE_OPTIMIZERS:
        features += [
            FeatureSpec(f"{o}/watched", "categorical", f"{o}/items"),
            FeatureSpec(f"{o}/history", "bag", f"{o}/items", "mean", 4),
            FeatureSpec(f"{o}/user", "categorical", f"{o}/users"),
        ]
        specs += [
            TableSpec(f"{o}/{t}", rows, DIM, 0.1, SparseOptimizerConfig(o), sharding, dtype) for t in ("items", "users")
        ]
    schema = Schema(tuple(features), {t.name: rows for t in specs}, ("a", "b"), ("label",))
    mesh = mesh_lib.create(mesh_lib.MeshConfig(*sizes))
    plan = make_plan(specs, schema, sizes[1], engine)
    model = DLRMConfig(bottom_mlp=(DIM,), top_mlp=(4,)).create(schema, DIM, policy("float32"), nnx.Rngs(params=0))
    graphdef, dense = nnx.split(model, nnx.Param)
    program = Program(
        graphdef,
        plan,
        mesh,
        DenseOptimizerConfig("sgd"),
        ScheduleConfig(),
        seed=0,
        tasks=1,
        auxiliary_weight=0.0,
        dense_shapes=jax.eval_shape(lambda: dense),
    )

    state = setup.state_shapes(program)
    bytes_per_device = sum(
        a.dtype.itemsize * math.prod(a.sharding.shard_shape(a.shape)) for a in jax.tree.leaves(state.tables)
    )
    batch = setup.batch_shapes(Dataset("test", schema, {}), BATCH, program)
    lowered = shard_train_step(program).lower(state, setup.window_shapes(program), batch)
    return bytes_per_device, lowered.compile().memory_analysis()


@pytest.mark.parametrize("sharding", ["row", "column"])
def test_memory_of_a_device_falls_with_model(sharding):
    """Weights and optimizer rows of tables split over 1, 2 and 8 devices; `column` has one scratch for all."""
    held = [compiled(sharding, (1, model), SMALL, "float32")[1].argument_size_in_bytes for model in (1, 2, 8)]
    whole = 4 * 2 * SMALL * len(SPARSE_OPTIMIZERS) if sharding == "column" else 0  # The scratch.
    of_row = sum(1 for o in SPARSE_OPTIMIZERS for wide in row_rule(SparseOptimizerConfig(o)).slots.values() if not wide)
    whole += 4 * 2 * SMALL * of_row if sharding == "column" else 0  # Row-wise Adagrad's one number a row.
    for model, size in zip((1, 2, 8), held, strict=True):
        assert size - whole == pytest.approx((held[0] - whole) / model, rel=0.01)


@pytest.mark.parametrize(
    "sharding, mesh, dtype, engine",
    cases(SHARDINGS, [(1, 1), (2, 4)], ["float32", "bfloat16", "float16"], INSTALLED_ENGINES),
)
def test_tables_are_aliased_and_temporaries_do_not_grow_with_them(sharding, mesh, dtype, engine):
    temporaries = []
    for rows in (SMALL, LARGE):
        table_bytes, memory = compiled(sharding, mesh, rows, dtype, engine)
        # Two tables of a group have room on two shards; the others' rows are split over all.
        shards = {"replicated": 1, "column": 1, "table": min(2, mesh[1])}.get(sharding, mesh[1])
        dim = DIM // mesh[1] if sharding == "column" else DIM
        # Weights, optimizer rows and the scratch of XLA's engine, of a group of two tables per optimizer.
        slots = [
            per_column for o in SPARSE_OPTIMIZERS for per_column in row_rule(SparseOptimizerConfig(o)).slots.values()
        ]
        numbers = (engine == "xla") * len(SPARSE_OPTIMIZERS) + sum(dim if per_column else 1 for per_column in slots)
        of_row = 4 * numbers + len(SPARSE_OPTIMIZERS) * dim * jnp.dtype(dtype).itemsize
        expected = 2 * rows * of_row // shards
        assert expected <= table_bytes <= 1.01 * expected
        assert memory.alias_size_in_bytes >= table_bytes
        # All that comes in but the batch, all that goes out but the step's number.
        assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < 10_000
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1_000
        assert memory.temp_size_in_bytes < 4 * rows // shards  # Not even one number a row.
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] > 0 and abs(temporaries[1] - temporaries[0]) <= 4096
