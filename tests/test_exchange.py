"""What crosses the wire: bytes by the formula and in the compiled program, capacities, and what happens beyond them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import cases

from jaxrec import mesh as mesh_lib
from jaxrec.embeddings import tables as tables_lib
from jaxrec.embeddings.plan import REPLICATE_BYTES, choose_shardings
from jaxrec.embeddings.sharded import capacity_of, exchanged_bytes
from jaxrec.embeddings.spec import SHARDINGS
from jaxrec.profiling.collectives import collectives
from jaxrec.training import setup
from jaxrec.training.config import Config
from jaxrec.training.loop import Options, StepRefused, train
from jaxrec.training.step import shard_train_step

DIM = 8


def config_of(tiny, sharding: str, mesh: tuple[int, int], *changes: str) -> Config:
    made = tiny("embedding.dim=8", "model.bottom_mlp=8,8", "data.ids=zipf", f"embedding.sharding={sharding}", *changes)
    return dataclasses.replace(made, mesh=mesh_lib.MeshConfig(*mesh))


def compiled_exchange(config: Config, *, training: bool):
    """Returns the plan, its capacities, N of each group, and the compiled lookup (and update) by itself."""
    dataset = config.data.open("")
    program, _ = setup.build_program(config, dataset, batches_of(config, dataset))
    sizes, plan = program.axis_sizes, program.plan

    def body(tables, ids, lengths, rate):
        activations, routes = tables_lib.look_up(plan, tables, ids, lengths, sizes, program.capacities)
        if not training:
            return activations
        merged = tables_lib.merge_gradients(plan, tables, routes, activations, lengths, sizes)
        return tables_lib.propose(plan, tables, merged, rate, jnp.int32(0), 0)

    specs = (tables_lib.partitions(plan), mesh_lib.BATCH, mesh_lib.BATCH, mesh_lib.REPLICATED)
    sharded = jax.shard_map(
        body, mesh=program.mesh, in_specs=specs, out_specs=mesh_lib.BATCH if not training else jax.P(), check_vma=False
    )
    shapes = setup.batch_shapes(dataset, config.training.batch_size, program)
    tables = tables_lib.initialise(plan, program.mesh, 0)
    lowered = jax.jit(sharded).lower(tables, shapes.ids, shapes.lengths, jnp.float32(1))
    rows = config.training.batch_size // config.mesh.size
    return plan, program.capacities, {g.name: rows * len(g.columns) for g in plan.groups}, lowered.compile()


def batches_of(config, dataset):
    from jaxrec.data.pipeline import Batches

    return Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)


@pytest.mark.parametrize(
    "sharding, mesh, dtype, training",
    cases(SHARDINGS, [(8, 1), (1, 8), (2, 4)], ["float32", "bfloat16", "float16"], [True, False]),
)
def test_compiled_bytes_are_the_formulas(tiny, sharding, mesh, dtype, training):
    config = config_of(tiny, sharding, mesh, f"embedding.dtype={dtype}")
    plan, capacities, occurrences, compiled = compiled_exchange(config, training=training)
    sizes = {"data": mesh[0], "model": mesh[1]}
    expected = sum(
        exchanged_bytes(g, capacity_of(g, occurrences[g.name], capacities[g.name]), sizes, training=training)
        for g in plan.groups
    )
    # Row-wise Adagrad's mean over columns that are spread is the one collective besides.
    counted = [c for c in collectives(compiled) if c.op != "all-reduce"]
    assert sum(c.received_bytes for c in counted) == expected
    assert (expected > 0) == (training or (sharding != "replicated" and mesh[1] > 1))
    reduced = [c for c in collectives(compiled) if c.op == "all-reduce"]
    assert len(reduced) == (len(plan.groups) if sharding == "column" and training and mesh[1] > 1 else 0)


@pytest.mark.parametrize("sharding", ["replicated", "row_cyclic", "table", "column"])
def test_sending_distinct_rows_pays_on_repeated_ids(tiny, sharding):
    """Measured capacities need fewer bytes than the worst case, the more so the more ids repeat."""
    received = {}
    for law in ("zipf", "uniform"):
        config = config_of(tiny, sharding, (2, 4), f"data.ids={law}", "data.rows=5000", "training.batch_size=1024")
        plan, capacities, occurrences, _ = compiled_exchange(config, training=True)
        (group,) = plan.groups
        received[law] = exchanged_bytes(group, capacities[group.name], {"data": 2, "model": 4})
        worst = exchanged_bytes(group, capacity_of(group, occurrences[group.name], 0), {"data": 2, "model": 4})
        assert received[law] < worst * config.embedding.capacity_margin
    assert received["zipf"] < received["uniform"]


def test_measured_capacities_are_the_margin_over_the_most(tiny):
    config = config_of(tiny, "row", (2, 4), "data.bag=1")
    dataset = config.data.open("")
    batches = batches_of(config, dataset)
    plan = setup.plan_tables(config, dataset.schema, "cpu")
    (group,) = plan.groups
    most = 0
    for k in range(setup.MEASURED_BATCHES):
        for ids in np.split(batches[k].batch.ids, 8):
            rows = np.unique(ids + group.offsets[np.asarray(group.slot_tables)])
            most = max(most, np.bincount(rows // group.shard_rows).max())
    capacity = setup.measure_capacities(config, plan, batches)[group.name]
    assert capacity % 8 == 0 and 1.5 * most <= capacity < 1.5 * most + 8
    assert setup.measure_capacities(dataclasses.replace(config, mesh=mesh_lib.MeshConfig()), plan, batches) == {}


@pytest.mark.parametrize("sharding", ["replicated", "row", "column"])
def test_an_overflow_refuses_the_step_and_says_what_to_raise(tiny, tmp_path, sharding, monkeypatch):
    config = config_of(tiny, sharding, (2, 4), "training.checkpoint_every=0", "training.eval_every=0")
    monkeypatch.setattr(
        setup, "measure_capacities", lambda config, plan, _: {} if config.embedding.capacity_margin == 0 else
        {g.name: 8 for g in plan.groups},
    )  # fmt: skip
    options = Options(str(tmp_path / "run"), "", quiet=True)
    message = r"^step 0: embedding group0_\w+ has more distinct rows .* than the 8 that"
    with pytest.raises(StepRefused, match=message) as e:
        train(config, options)
    assert "rows too many over all devices" in str(e.value) and "--capacity_margin above 1.5, or 0" in str(e.value)
    wider = dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, capacity_margin=0.0))
    resumed, status = train(wider, options)
    assert status == 0 and resumed["steps"] == 40
    straight, _ = train(wider, Options(str(tmp_path / "straight"), "", quiet=True))
    assert resumed["metrics"] == straight["metrics"]


def test_an_overflow_leaves_the_state_on_every_device(tiny):
    config = config_of(tiny, "row", (2, 4), "data.bag=1")
    dataset = config.data.open("")
    program, dense = setup.build_program(config, dataset)
    program = dataclasses.replace(program, capacities={g.name: 8 for g in program.plan.groups})
    state, window = setup.initial_state(program, dense), setup.new_window(program)
    before = jax.tree.map(lambda x: [np.asarray(s.data) for s in x.addressable_shards], (state.dense, state.tables))
    batch = batches_of(config, dataset)[0].batch
    put = setup.put_batch(program)
    state, window, _ = shard_train_step(program)(state, window, put(batch))
    # Counted by hand: distinct rows of each device beyond 8 a shard.
    (group,) = program.plan.groups
    beyond = 0
    for ids in np.split(batch.ids, 8):
        rows = np.unique(ids + group.offsets[np.asarray(group.slot_tables)])
        beyond += np.maximum(np.bincount(rows // group.shard_rows) - 8, 0).sum()
    assert int(state.overflow) == beyond > 0 and int(state.failed_step) == 0 and int(state.step) == 0
    after = jax.tree.map(lambda x: [np.asarray(s.data) for s in x.addressable_shards], (state.dense, state.tables))
    for name, table in after[1].items():
        after[1][name] = table._replace(work=before[1][name].work)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a.tobytes() == b.tobytes()
    assert math.isfinite(float(window.loss)) and float(window.weight) == 0


def test_auto_chooses_by_size():
    rows = REPLICATE_BYTES // 64
    chosen = choose_shardings({"small": rows, "a": rows + 1, "b": rows + 1, "c": rows + 1, "huge": 50 * rows}, 64, 4)
    assert {name: sharding for name, (sharding, _) in chosen.items()} == {
        "small": "replicated", "a": "table", "b": "table", "c": "table", "huge": "row_cyclic"
    }  # fmt: skip
    assert "at most 4 MiB" in chosen["small"][1] and "200.0 MiB, more than a device's share" in chosen["huge"][1]
    assert {s for s, _ in choose_shardings({"huge": 50 * rows}, 64, 1).values()} == {"replicated"}
