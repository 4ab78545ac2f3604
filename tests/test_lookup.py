"""The pooled lookup against a NumPy loop, and the layout of the tables, on every mesh and sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import INSTALLED_ENGINES, cases

from jaxrec import mesh as mesh_lib
from jaxrec.checks import UserError
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.embeddings import lookup
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.plan import make_plan
from jaxrec.embeddings.spec import SHARDINGS, EmbeddingConfig, TableSpec
from jaxrec.optim.sparse import SparseOptimizerConfig

B = 16
ROWS = {"items": 37, "users": 5, "tags": 10, "wide": 7}
DIM = {"items": 8, "users": 8, "tags": 8, "wide": 16}
# Features of one shape do not stand together, so that a group's columns are not a range.
FEATURES = (
    FeatureSpec("watched", "categorical", "items"),
    FeatureSpec("history", "bag", "items", "mean", 4),
    FeatureSpec("wide", "bag", "wide", "sum", 2),
    FeatureSpec("user", "categorical", "users", "mean"),
    FeatureSpec("sequence", "history", "items", "none", 3),
    FeatureSpec("tags", "bag", "tags", "sum", 4),
    FeatureSpec("likes", "bag", "items", "mean", 4),
    FeatureSpec("place", "categorical", "tags", "none"),
)
SCHEMA = Schema(FEATURES, ROWS, (), ("label",))
MESHES = ((1, 1), (1, 2), (2, 1), (8, 1), (1, 8), (2, 4))

over_strategies = pytest.mark.parametrize("sharding", SHARDINGS)


def plan_of(sharding: str, model: int, optimizer: str = "sgd", engine: str = "xla"):
    config = SparseOptimizerConfig(optimizer, initial_accumulator=0.5)
    tables = [TableSpec(t, r, DIM[t], 0.1, config, sharding) for t, r in ROWS.items()]
    return make_plan(tables, SCHEMA, model, engine)


def batch():
    """Ids [B, K] and lengths [B, bags]: empty and full bags, repeated ids, the first and the last row."""
    rng = np.random.default_rng(0)
    lengths = {f.name: rng.integers(0, f.max_length + 1, B) for f in SCHEMA.bags}
    columns = []
    for f in FEATURES:
        ids = rng.integers(0, ROWS[f.table], (B, f.max_length))
        ids[0], ids[1] = 0, ROWS[f.table] - 1
        if f.name in lengths:
            lengths[f.name][:4] = f.max_length, f.max_length, 0, 1
            ids = np.where(np.arange(f.max_length) < lengths[f.name][:, None], ids, 0)
        columns.append(ids)
    return np.concatenate(columns, axis=1).astype(np.int32), np.stack(list(lengths.values()), axis=1).astype(np.int32)


def weights():
    rng = np.random.default_rng(1)
    return {t: rng.normal(size=(rows, DIM[t])).astype(np.float32) for t, rows in ROWS.items()}


@functools.cache
def reference():
    """Feature -> float64 activations, by loops."""
    ids, lengths = batch()
    out, start, bag = {}, 0, 0
    for f in FEATURES:
        table = weights()[f.table].astype(np.float64)
        out[f.name] = np.zeros((B, f.max_length, DIM[f.table]) if f.combiner == "none" else (B, DIM[f.table]))
        for b in range(B):
            length = 1 if f.kind == "categorical" else lengths[b, bag]
            for position in range(length):
                vector = table[ids[b, start + position]]
                if f.combiner == "none":
                    out[f.name][b, position] = vector
                else:
                    out[f.name][b] += vector / (length if f.combiner == "mean" else 1)
        start += f.max_length
        bag += f.kind != "categorical"
    return out


@pytest.mark.parametrize("sharding, mesh, engine", cases(SHARDINGS, MESHES, INSTALLED_ENGINES))
def test_lookup_equals_a_loop(sharding, mesh, engine):
    plan, device_mesh = plan_of(sharding, mesh[1], engine=engine), mesh_lib.create(mesh_lib.MeshConfig(*mesh))
    tables = {}
    for g in plan.groups:
        array = tables_lib.put(g.from_logical(weights(), 0.0), device_mesh, g.partition(True))
        tables[g.name] = tables_lib.Table(array, {}, jnp.zeros(8, jnp.int32))  # A lookup does not read it.
    look_up = jax.jit(
        jax.shard_map(
            lambda tables, ids, lengths: tables_lib.look_up(plan, tables, ids, lengths, dict(device_mesh.shape))[0],
            mesh=device_mesh,
            in_specs=(tables_lib.partitions(plan), mesh_lib.BATCH, mesh_lib.BATCH),
            out_specs=mesh_lib.BATCH,
            check_vma=False,
        )
    )
    activations = look_up(tables, *batch())
    assert set(activations) == set(reference())
    for name, expected in reference().items():
        assert activations[name].shape == expected.shape and activations[name].dtype == jnp.float32
        np.testing.assert_allclose(activations[name], expected, rtol=1e-6, atol=1e-6, err_msg=name)
        if name in ("history", "tags", "sequence"):
            assert (np.asarray(activations[name])[2] == 0).all()  # The empty bag.


def test_spread_is_the_transpose_of_pool():
    _, lengths = batch()
    rng = np.random.default_rng(2)
    for group in plan_of("row", 2).groups:
        slots = len(group.columns)
        # Slots past a bag's length always hold zeros, and what `spread` puts there is never applied.
        rows = np.asarray(lookup.places_of_slots(group, batch()[0], lengths))
        used = (rows != group.sentinel)[..., None]
        vectors = jnp.asarray(rng.normal(size=(B, slots, group.dim)) * used, jnp.float32)
        pooled, transpose = jax.vjp(lambda v, g=group: lookup.pool(g, v, lengths), vectors)
        gradients = {k: jnp.asarray(rng.normal(size=v.shape), jnp.float32) for k, v in pooled.items()}
        spread = lookup.spread(group, gradients, lengths)
        np.testing.assert_allclose(spread * used, transpose(gradients)[0] * used, rtol=1e-6, atol=0)
        assert used.sum() < used.size or not any(s.bags for s in group.segments)


def test_initial_tables_are_the_same_on_every_mesh_and_sharding():
    first = None
    for sharding in SHARDINGS:
        for sizes in MESHES:
            plan = plan_of(sharding, sizes[1], "adagrad")
            mesh = mesh_lib.create(mesh_lib.MeshConfig(*sizes))
            tables = tables_lib.initialise(plan, mesh, seed=3)
            logical = {}
            for g in plan.groups:
                array = np.asarray(tables[g.name].weights)
                accumulator = np.asarray(tables[g.name].slots["accumulator"])
                assert array.shape == accumulator.shape == (g.array_rows, g.dim)
                sentinels = array.reshape(g.shards, g.shard_rows + 1, g.dim)[:, -1]
                assert (sentinels == 0).all() and (accumulator == 0.5).all()
                logical |= g.to_logical(array)
            first = first or logical
            assert set(logical) == set(ROWS)
            for name, table in logical.items():
                assert table.tobytes() == first[name].tobytes(), (sharding, sizes, name)
    assert first is not None
    for name, table in first.items():
        assert table.shape == (ROWS[name], DIM[name])
        assert np.abs(table).max() <= 0.1 and len(np.unique(table)) == table.size
    assert 0.05 < first["items"].std() * 3**0.5 < 0.15  # Uniform in [-0.1, 0.1).
    other = tables_lib.initialise(plan_of("row", 1), mesh_lib.create(mesh_lib.MeshConfig()), seed=4)
    assert not np.isin(np.asarray(next(iter(other.values())).weights)[:5], first["items"]).any()


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("trailing", [True, False])
def test_logical_arrays_survive_the_layout(shards, trailing):
    for group in plan_of("row", shards).groups:
        rng = np.random.default_rng(shards)
        shape = (group.dim,) if trailing else ()
        tables = {t.name: rng.normal(size=(t.rows, *shape)).astype(np.float32) for t in group.tables}
        array = group.from_logical(tables, fill=7.0)
        assert array.shape == (group.array_rows, *shape)
        back = group.to_logical(array)
        assert list(back) == [t.name for t in group.tables]
        for name, value in tables.items():
            assert back[name].tobytes() == value.tobytes()
        # Shard s holds rows s * shard_rows, ... of the concatenation; whatever is no row holds the fill.
        concatenated = np.concatenate(list(tables.values()))
        for s, shard in enumerate(array.reshape(shards, group.shard_rows + 1, *shape)):
            own = concatenated[s * group.shard_rows : (s + 1) * group.shard_rows]
            assert (shard[: len(own)] == own).all() and (shard[len(own) :] == 7.0).all()


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@over_strategies
def test_every_row_has_a_place_of_its_own(sharding, shards):
    for group in plan_of(sharding, shards).groups:
        rows = np.concatenate(
            [offset + np.arange(t.rows) for offset, t in zip(group.offsets, group.tables, strict=True)]
        )
        places = group.place(rows.astype(np.int32))
        assert len(np.unique(places)) == group.rows
        assert places.min() >= 0 and places.max() < group.sentinel
        np.testing.assert_array_equal(group.unplace(places), rows)
        np.testing.assert_array_equal(group.place(jnp.asarray(rows, jnp.int32)), places)
        tables = {t.name: np.arange(t.rows, dtype=np.float32) for t in group.tables}
        back = group.to_logical(group.from_logical(tables, fill=-1.0))
        assert all(back[name].tobytes() == value.tobytes() for name, value in tables.items())
        if sharding == "table":  # A table lies on one shard.
            assert all(len(np.unique(group.place(o) // group.shard_rows)) == 1 for o in group.offsets)
            assert group.shard_rows == max(t.rows for t in group.tables) or shards == 1
        if sharding == "row_cyclic":  # Neighbours are dealt out: a run of as many rows as shards has one on each.
            owners = places[: len(places) // shards * shards].reshape(-1, shards) // group.shard_rows
            assert (np.sort(owners, axis=1) == np.arange(shards)).all()


def test_groups_share_what_their_tables_share():
    plan = plan_of("row", 2)
    assert [tuple(t.name for t in g.tables) for g in plan.groups] == [("items", "users", "tags"), ("wide",)]
    assert plan.groups[0].shards == 2 and plan_of("replicated", 2).groups[0].shards == 1
    assert plan.groups[0].shard_rows == 26 and plan.groups[0].array_rows == 54
    assert "rows over 2 devices of model" in plan.describe()[0]
    with pytest.raises(UserError, match=r"2\^31"):
        schema = Schema((FeatureSpec("a", "categorical", "a"),), {"a": 2**31}, (), ("label",))
        make_plan([EmbeddingConfig().table("a", 2**31, "replicated")], schema, 1)
