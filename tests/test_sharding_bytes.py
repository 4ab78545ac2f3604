"""The study of shardings: balance against loops, the comparison with one device, and one small measurement."""

import copy
import dataclasses

import numpy as np
import pytest

from experiments.finished import Finished
from experiments.sharding_bytes import balance, report, run
from jaxrec.data.pipeline import Batches
from jaxrec.embeddings.spec import SHARDINGS
from jaxrec.mesh import MeshConfig
from jaxrec.reporting import record as record_lib
from jaxrec.training import setup

ROWS = (50, 7, 23, 40)


def test_heaviest_over_mean():
    assert balance.heaviest_over_mean(np.array([1, 1, 2])) == 1.5
    assert balance.heaviest_over_mean(np.array([3, 3, 3])) == 1
    assert balance.heaviest_over_mean(np.array([0, 0, 8])) == 3
    assert balance.heaviest_over_mean(np.zeros(4)) == 1


def planned(tiny, sharding: str, mesh: tuple[int, int], *changes: str):
    config = tiny(
        "embedding.dim=8", "data.ids=zipf", f"embedding.sharding={sharding}", "training.batch_size=64", *changes
    )
    data = dataclasses.replace(config.data, tables=len(ROWS), rows=ROWS, bag=3)
    config = dataclasses.replace(config, data=data, mesh=MeshConfig(*mesh))
    dataset = config.data.open("")
    return config, setup.plan_tables(config, dataset.schema, "cpu"), Batches(dataset, "train", 64)


def test_rows_held_by_hand(tiny):
    # The largest table goes to the emptiest shard: 50 and 7, 40 and 23.
    assert sorted(balance.rows_held(planned(tiny, "table", (1, 2))[1])) == [57, 63]
    assert sorted(balance.rows_held(planned(tiny, "table", (1, 8))[1])) == [0, 0, 0, 0, 7, 23, 40, 50]
    # 120 rows, 15 a shard.
    assert balance.rows_held(planned(tiny, "row", (1, 8))[1]).tolist() == [15] * 8
    assert balance.rows_held(planned(tiny, "row_cyclic", (1, 8))[1]).tolist() == [15] * 8
    for sharding in ("replicated", "column"):
        assert balance.rows_held(planned(tiny, sharding, (1, 8))[1]).tolist() == [0] * 8


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_asked_is_what_a_loop_counts(tiny, sharding):
    data, model = 2, 4
    _, plan, batches = planned(tiny, sharding, (data, model))
    batch, (group,) = batches[0].batch, plan.groups
    capacity = 16
    ids, rows, sent = np.zeros((data, model)), np.zeros((data, model)), {}
    share = len(batch.ids) // (data * model)
    for device in range(data * model):
        distinct = set()
        for row in range(device * share, (device + 1) * share):
            for feature in range(len(ROWS)):
                for slot in range(batch.lengths[row, feature]):
                    number = int(batch.ids[row, 3 * feature + slot])
                    table = next(i for i, t in enumerate(group.tables) if t.name == f"table_{feature}")
                    place = int(group.place(np.array([group.offsets[table] + number]))[0])
                    shard = place // group.shard_rows
                    distinct.add((shard, place))
                    ids[device // model, shard] += 1
        for shard, _ in distinct:
            rows[device // model, shard] += 1
            sent[device, shard] = sent.get((device, shard), 0) + 1
    found = balance.asked(plan, batch, {"data": data, "model": model}, {group.name: capacity})
    if group.shards > 1:
        assert found.ids == pytest.approx(ids.max() / ids.mean()) and found.ids > 1
        assert found.rows == pytest.approx(rows.max() / rows.mean()) and found.rows > 1
    else:
        assert (found.ids, found.rows) == (1, 1)
    assert found.filled == pytest.approx(sum(sent.values()) / (data * model * group.shards * capacity))
    assert found.fullest == pytest.approx(max(sent.values()) / capacity)


def test_the_fullest_destination_is_what_capacities_are_measured_by(tiny):
    config, plan, batches = planned(tiny, "row_cyclic", (2, 4), "embedding.capacity_margin=1")
    capacities = setup.measure_capacities(config, plan, batches)
    sizes = {"data": 2, "model": 4}
    fullest = [balance.asked(plan, batches[k].batch, sizes, capacities).fullest for k in range(setup.MEASURED_BATCHES)]
    # Capacities are rounded up to a multiple of 8.
    (capacity,) = capacities.values()
    assert capacity - 8 < max(fullest) * capacity <= capacity


def test_the_largest_difference_sees_lost_and_doubled_updates():
    first = {"w": np.array([1.0, 5.0, 100.0]), "still": np.ones(2)}
    one = {"w": np.array([1.0, 5.001, 100.002]), "still": np.ones(2)}
    assert run.largest_difference(one, one, first) == 0
    lost, doubled = copy.deepcopy(one), copy.deepcopy(one)
    lost["w"][2], doubled["w"][1] = first["w"][2], 5.002
    assert run.largest_difference(lost, one, first) == pytest.approx(1)
    assert run.largest_difference(doubled, one, first) == pytest.approx(0.5)
    moved = {**one, "still": np.array([1.0, 1.1])}
    assert run.largest_difference(moved, one, first) > 1, "what one device did not train has changed"
    assert run.digest_of(one) != run.digest_of(lost) and run.digest_of(one) == run.digest_of(copy.deepcopy(one))


def test_the_exchange_is_that_of_tables_alone():
    text = """
  %a = s32[8,4]{1,0} all-to-all(%x), replica_groups={{0,1,2,3}}, metadata={op_name="jit(f)/embedding_lookup/a"}
  %b = f32[40]{0} all-gather(%x), replica_groups={{0,1,2,3}}, metadata={op_name="jit(f)/jvp(top_mlp)/all_gather"}
  %c = f32[16]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, metadata={op_name="jit(f)/embedding_update/psum"}
  %d = f32[16]{0} all-gather(%x), replica_groups={{0,1}}, metadata={op_name="jit(f)/embedding_update/g"}
"""
    assert run.exchange_in(text) == 8 * 4 * 4 * 3 / 4 + 16 * 4 / 2


@pytest.fixture(scope="module")
def record(compile_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding_bytes")
    record_lib.write(run.measure(run.SMOKE, Finished(None, {})), folder)
    return record_lib.read(folder)


def test_a_small_measurement(record):
    assert {(r["case"], r["name"]): r["claim"] for r in record["rows"]} == {
        ("data:1,model:8, zipf ids", "table"): "measured",
        ("data:2,model:4, uniform ids", "row_cyclic, fsdp"): "compiled, not run",
    }
    for case, name in (("data:1,model:8, zipf ids", "table"), ("data:2,model:4, uniform ids", "row_cyclic, fsdp")):
        program, formula = (
            record_lib.find(record, case=case, name=name, metric=m)["median"]
            for m in ("embedding exchange", "embedding exchange by formula")
        )
        assert program == formula > 0
    difference = record_lib.find(record, metric="largest difference to one device")["median"]
    assert 0 < difference < report.AGREES
    assert record_lib.find(record, metric="steps refused")["median"] == 0
    # Four tables on eight devices; the largest has most of the rows.
    held = record_lib.find(record, case="data:1,model:8, zipf ids", metric="rows held, heaviest / mean")["median"]
    assert held == pytest.approx(8 * max(run.SMOKE.rows) / sum(run.SMOKE.rows))


def test_the_report_says_what_differs(record):
    text = report.render(record)
    assert "In all 2 compiled programs the tables' exchange is the formula's, to the byte." in text
    changed = copy.deepcopy(record)
    record_lib.find(changed, name="table", metric="embedding exchange by formula")["median"] += 4
    record_lib.find(changed, metric="largest difference to one device")["median"] = 0.5
    text = report.render(changed)
    assert "Formula and program differ for table (data:1,model:8, zipf ids)." in text
    assert "not every layout ends with one device's weights: the largest difference is 0.5" in text


def test_the_pictures_are_drawn(record):
    pytest.importorskip("matplotlib")
    assert set(report.figures(record)) == {"received.svg", "memory.svg"}
