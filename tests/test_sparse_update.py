"""The sparse update against NumPy in float64: sharding x optimizer x combiner, on 1, 2 and 8 devices.

One program per (sharding, combiner, mesh) updates a group per optimizer with the same ids and activation gradients, in
float32 tables and in two narrower ones, by each engine. The merged row gradient is read off the SGD group: from zero
weights with learning rate 1, the new weights are its negative.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import plain_step
import pytest
from cover import INSTALLED_ENGINES, cases

from jaxrec import mesh as mesh_lib
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.plan import make_plan
from jaxrec.embeddings.spec import SHARDINGS, TableSpec
from jaxrec.optim.sparse import SparseOptimizerConfig

EPS = float(np.finfo(np.float32).eps)
B, D, L = 16, 8, 4
ROWS = {"items": 37, "tags": 10}
STEPS = 3
RATE = 0.25  # The schedule's factor, as the learning rates below exact in float32.
OPTIMIZERS = {
    "sgd": SparseOptimizerConfig("sgd", learning_rate=1.0),
    # eps is large, so that its place in the formula shows.
    "rowwise_adagrad": SparseOptimizerConfig("rowwise_adagrad", learning_rate=0.5, eps=2.0**-4),
    "adagrad": SparseOptimizerConfig("adagrad", learning_rate=0.5, eps=2.0**-4, initial_accumulator=0.125),
    "adam": SparseOptimizerConfig("adam", learning_rate=0.5, eps=2.0**-4, b1=0.75, b2=0.875),
    "momentum": SparseOptimizerConfig("momentum", learning_rate=0.5, b1=0.75, weight_decay=0.125),
}
NARROW = {"rowwise_adagrad_bfloat16": "bfloat16", "adam_float16": "float16"}
OPTIMIZERS |= {name: OPTIMIZERS[name.rpartition("_")[0]] for name in NARROW}
# Feature -> table; `watched` is categorical, the others are bags.
FEATURES = {"watched": "items", "history": "items", "tags": "tags"}
MESHES = ((1, 1), (1, 2), (2, 1), (8, 1), (1, 8), (2, 4))

pytestmark = pytest.mark.parametrize(
    "sharding, combiner, mesh, engine",
    cases(SHARDINGS, ["sum", "mean", "none"], MESHES, INSTALLED_ENGINES),
    ids=lambda v: v if isinstance(v, str) else f"data{v[0]}model{v[1]}",
)
over_optimizers = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


class Step(NamedTuple):
    """One batch: ids of each feature, lengths of the bags, and the gradient of each feature's activations."""

    ids: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


class Run(NamedTuple):
    """What a program did, on the host: logical arrays by (optimizer, table), `weights` and `accumulator`."""

    before: list[dict]
    after: list[dict]
    merged: list[dict]  # Table -> [rows, D].
    merged_dyadic: list[dict]
    arrays: list  # The global jax arrays after each step.
    refused: list  # (array before, array after) of steps with ok=False.


def make_step(combiner: str, number: int, dyadic: bool) -> Step:
    rng = np.random.default_rng([number, dyadic])
    sizes = [0, 1, 2, 4] if dyadic else [0, 1, 2, 3, 4]
    lengths = {"history": rng.choice(sizes, B), "tags": rng.choice(sizes, B)}
    if number == 0:  # Few different ids, so that they repeat over and within rows; both ends of both tables.
        ids = {
            "watched": rng.choice([0, 5, 6, 36], (B, 1)),
            "history": rng.choice([0, 5, 20, 36], (B, L)),
            "tags": rng.choice([0, 9], (B, L)),
        }
        ids["history"][3] = 20
        lengths["history"][3] = 4  # One id four times in a bag.
        lengths["history"][4] = lengths["tags"][4] = 0
    elif number == 1:  # Every id of the batch is the same, and not the 0 that fills the slots past a bag's length.
        ids = {name: np.full((B, 1 if name == "watched" else L), 7) for name in FEATURES}
    else:  # All rows; no tags at all.
        ids = {name: rng.integers(0, ROWS[t], (B, 1 if name == "watched" else L)) for name, t in FEATURES.items()}
        lengths["tags"][:] = 0
    for name, length in lengths.items():
        ids[name] = np.where(np.arange(L) < length[:, None], ids[name], 0)

    def gradient(name: str) -> np.ndarray:
        shape = (B, D) if combiner != "none" else (B, ids[name].shape[1], D)
        if dyadic:
            return rng.integers(-64, 65, shape).astype(np.float32) / 16
        return (rng.normal(size=shape) * 10.0 ** rng.uniform(-2, 2, shape)).astype(np.float32)

    return Step(ids, lengths, {name: gradient(name) for name in FEATURES})


def occurrences(step: Step, combiner: str):
    """Yields (table, row, float64 term) for every id of the batch."""
    for name, table in FEATURES.items():
        for b in range(B):
            length = step.lengths[name][b] if name in step.lengths else 1
            for position in range(length):
                g = step.gradients[name][b].astype(np.float64)
                g = g[position] if combiner == "none" else g / length if combiner == "mean" else g
                yield table, step.ids[name][b, position], g


def reference_merge(step: Step, combiner: str):
    """Returns, by table: float64 sums, sums of absolute terms, and the number of occurrences of each row."""
    total = {t: np.zeros((rows, D)) for t, rows in ROWS.items()}
    absolute = {t: np.zeros((rows, D)) for t, rows in ROWS.items()}
    count = {t: np.zeros(rows, int) for t, rows in ROWS.items()}
    for table, row, g in occurrences(step, combiner):
        total[table][row] += g
        absolute[table][row] += np.abs(g)
        count[table][row] += 1
    return total, absolute, count


def reference_update(optimizer: str, gradient: np.ndarray, before: dict[str, np.ndarray], step: int):
    """Returns in float64, by part: new values, and the sum of the absolute terms that each was made of."""
    config = OPTIMIZERS[optimizer]
    g, rate, w = gradient.astype(np.float64), config.learning_rate * RATE, before["weights"].astype(np.float64)
    old = {part: v.reshape(len(v), -1) for part, v in before.items() if part != "weights"}
    expected, slots = plain_step.update(config, w, g, old, rate, step)
    # The same of absolute values, from weights 0: what it subtracts is the size of the direction times the rate.
    absolute = {part: np.abs(v) for part, v in old.items()}
    minus, sizes = plain_step.update(config, np.zeros_like(w), np.abs(g), absolute, rate, step)
    shaped = [{part: v.reshape(before[part].shape) for part, v in s.items()} for s in (slots, sizes)]
    return {"weights": expected, **shaped[0]}, {"weights": np.abs(w) * (1 + rate) - minus, **shaped[1]}


@functools.cache
def run(sharding: str, combiner: str, mesh_sizes: tuple[int, int], engine: str) -> Run:
    features, specs = [], []
    for optimizer, config in OPTIMIZERS.items():
        dtype = NARROW.get(optimizer, "float32")
        specs += [TableSpec(f"{optimizer}/{t}", rows, D, 0.1, config, sharding, dtype) for t, rows in ROWS.items()]
        for name, table in FEATURES.items():
            kind, length = ("categorical", 1) if name == "watched" else ("bag", L)
            features.append(FeatureSpec(f"{optimizer}/{name}", kind, f"{optimizer}/{table}", combiner, length))
    schema = Schema(tuple(features), {s.name: s.rows for s in specs}, (), ("label",))
    plan = make_plan(specs, schema, mesh_sizes[1], engine)
    mesh = mesh_lib.create(mesh_lib.MeshConfig(*mesh_sizes))
    sizes = dict(mesh.shape)
    partitions = tables_lib.partitions(plan)

    def body(tables, ids, lengths, gradients, rate, step, ok):
        _, routes = tables_lib.look_up(plan, tables, ids, lengths, sizes)
        merged = tables_lib.merge_gradients(plan, tables, routes, gradients, lengths, sizes)
        proposals = tables_lib.propose(plan, tables, merged, rate, step, 0)
        return tables_lib.commit(plan, tables, proposals, ok)

    specs_in = (partitions, mesh_lib.BATCH, mesh_lib.BATCH, mesh_lib.BATCH, *[mesh_lib.REPLICATED] * 3)
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs_in, out_specs=partitions, check_vma=False))

    def update(tables, step: Step, rate: float, number: int, ok: bool = True):
        ids = np.concatenate([step.ids[f.name.split("/")[1]] for f in features], axis=1).astype(np.int32)
        lengths = np.stack([step.lengths[f.name.split("/")[1]] for f in schema.bags], axis=1).astype(np.int32)
        gradients = {f.name: step.gradients[f.name.split("/")[1]] for f in features}
        return program(tables, ids, lengths, gradients, jnp.float32(rate), jnp.int32(number), jnp.asarray(ok))

    def new_tables(seed: int | None):
        """Random weights and, of XLA's engine, scratch, or zeros without a seed."""
        rng = np.random.default_rng(seed)
        tables = {}
        for g in plan.groups:
            draw = {t.name: (rng.normal(size=(t.rows, D)) * (seed is not None)).astype(g.dtype) for t in g.tables}
            slots = {
                name: {t.name: np.full((t.rows, D)[: 1 + wide], g.rule.initial, np.float32) for t in g.tables}
                for name, wide in g.rule.slots.items()
            }
            table = tables_lib.from_logical(g, mesh, {"weights": draw, **slots})
            if engine == "xla":
                garbage = rng.integers(0, 1000, table.work.shape).astype(np.int32) * (seed is not None)
                table = table._replace(work=jax.device_put(garbage, table.work.sharding))
            tables[g.name] = table
        return tables

    def logical(tables):
        out = {}
        for g in plan.groups:
            table = tables[g.name]
            parts = {"weights": np.asarray(table.weights).view(g.dtype), **table.slots}
            for part, array in parts.items():
                for name, value in g.to_logical(np.asarray(array)).items():
                    out.setdefault(tuple(name.split("/")), {})[part] = value
        return out

    def merged(step: Step):
        after = logical(update(new_tables(None), step, 1.0, 0))
        return {t: -after["sgd", t]["weights"] for t in ROWS}

    steps = [make_step(combiner, k, dyadic=False) for k in range(STEPS)]
    tables = new_tables(1)
    result = Run([], [], [merged(s) for s in steps], [], [], [])
    for k, step in enumerate(steps):
        result.before.append(logical(tables))
        poisoned = step._replace(
            gradients={n: np.full_like(g, [1, np.nan, np.inf][k]) for n, g in step.gradients.items()}
        )
        refused = update(tables, poisoned, RATE, k, ok=False)
        for g in plan.groups:
            old, new = tables[g.name], refused[g.name]
            result.refused.append(((old.weights, old.slots), (new.weights, new.slots)))
        tables = update(refused, step, RATE, k)
        result.after.append(logical(tables))
        result.arrays.append({g.name: (g, tables[g.name]) for g in plan.groups})
    result.merged_dyadic.extend(merged(make_step(combiner, k, dyadic=True)) for k in range(STEPS))
    return result


def test_merged_gradient_is_within_n_eps_of_float64(sharding, combiner, mesh, engine):
    for k, merged in enumerate(run(sharding, combiner, mesh, engine).merged):
        total, absolute, count = reference_merge(make_step(combiner, k, dyadic=False), combiner)
        for t in ROWS:
            bound = count[t][:, None] * EPS * absolute[t]
            assert (np.abs(merged[t] - total[t]) <= bound).all(), (k, t)
    assert count["items"].max() > 1  # The data have duplicates.


def test_merged_gradient_is_exact_for_dyadic_gradients(sharding, combiner, mesh, engine):
    for k, merged in enumerate(run(sharding, combiner, mesh, engine).merged_dyadic):
        total, _, count = reference_merge(make_step(combiner, k, dyadic=True), combiner)
        for t in ROWS:
            np.testing.assert_array_equal(merged[t], total[t], err_msg=f"step {k}, {t}")
        assert k != 1 or count["items"][7] > B  # Every id of the batch.


@over_optimizers
def test_rows_follow_the_optimizer_within_8_eps(sharding, combiner, optimizer, mesh, engine):
    result = run(sharding, combiner, mesh, engine)
    for k in range(STEPS):
        _, _, count = reference_merge(make_step(combiner, k, dyadic=False), combiner)
        for t, rows in ROWS.items():
            before, after = result.before[k][optimizer, t], result.after[k][optimizer, t]
            expected, size = reference_update(optimizer, result.merged[k][t], before, k)
            touched = count[t] > 0
            assert expected.keys() == before.keys()
            for part, value in expected.items():
                error, bound = np.abs(after[part].astype(np.float64) - value), 8 * EPS * size[part]
                if part == "weights" and optimizer in NARROW:  # One of the two neighbours.
                    bound += np.maximum(float(jnp.finfo(NARROW[optimizer]).eps) * np.abs(value), 2.0**-24)
                assert (error <= bound)[touched].all(), (k, t, part)
            for part in before:
                changed = (before[part] != after[part]).reshape(rows, -1).any(axis=1)
                assert before[part][~touched].tobytes() == after[part][~touched].tobytes()
                assert changed[touched].all() or (part == "weights" and optimizer in NARROW), (k, t, part)


def test_replicas_are_identical_and_sentinels_untouched(sharding, combiner, mesh, engine):
    for groups in run(sharding, combiner, mesh, engine).arrays:
        for group, table in groups.values():
            for array, initial in ((table.weights, 0.0), *((s, group.rule.initial) for s in table.slots.values())):
                copies = {}
                for shard in array.addressable_shards:
                    copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
                different = group.shards * (group.column_shards if array.ndim == 2 else 1)
                assert len(copies) == different
                for first, *others in copies.values():
                    assert len(others) + 1 == mesh[0] * mesh[1] // different
                    for other in others:
                        assert first.tobytes() == other.tobytes()
                    assert (first[-1] == initial).all()
                    assert len(first) == group.shard_rows + 1


def test_a_refused_update_changes_no_bit(sharding, combiner, mesh, engine):
    refused = run(sharding, combiner, mesh, engine).refused
    assert len(refused) == STEPS * len(OPTIMIZERS)
    for before, after in refused:
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            for a, b in zip(old.addressable_shards, new.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
