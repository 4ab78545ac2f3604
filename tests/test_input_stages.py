"""The profile of the input: every stage is timed, and the command says so."""

import json

import jax
import numpy as np
import pytest

from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.block_writer import counted, prepare
from jaxrec.data.blocks import Facts, columns_of, read
from jaxrec.data.schema import Dataset, FeatureSpec, Schema
from jaxrec.data.timelines import Timelines
from jaxrec.profiling import input_stages

ROWS = 20_000


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The same rows in files and in memory."""
    rng = np.random.default_rng(0)
    columns = {
        "labels": (rng.random((ROWS, 1)) < 0.5).astype(np.float32),
        "dense": rng.random((ROWS, 3), np.float32),
        "group": rng.integers(0, 50, ROWS, np.int32),
        "position": rng.integers(0, 20, ROWS, np.int32),
        "site": rng.integers(0, 9, ROWS, np.int32),
    }
    events = Timelines(np.arange(51) * 20, {"item": rng.integers(0, 30, 1000, np.int32)}, "few")
    features = (
        FeatureSpec("site", "categorical", "site"),
        FeatureSpec("items", "history", "item", "mean", 7, column="item"),
    )
    schema = Schema(features, {"site": 9, "item": 30}, ("a", "b", "c"), ("click",))
    arrays = ArrayBlocks(columns, 8192)
    facts = Facts("few", "1.0.0", "a test", schema.vocabulary, schema.dense, schema.labels)
    folder = tmp_path_factory.mktemp("data") / "few-1.0.0"
    prepare(folder, facts, columns_of(arrays[0]), {"train": counted(arrays)}, events)
    prepared = read(folder)
    return {
        "files": Dataset("few", schema, prepared.splits, prepared.timelines),
        "memory": Dataset("few", schema, {"train": arrays}, events),
    }


@pytest.mark.parametrize("where", ["files", "memory"])
def test_every_stage_is_timed(datasets, where):
    taken = []

    def put(batch):
        taken.append(batch)
        return jax.device_put(batch)

    stages = input_stages.measure(datasets[where], 512, put, threads=1, samples=3, seconds=0.01)
    names = [stage.name for stage in stages]
    assert names == [s for s in input_stages.STAGES if s != "decode" or where == "files"]
    for stage in stages:
        assert len(stage.rows_per_second) == 3
        assert min(stage.rows_per_second) <= stage.median <= max(stage.rows_per_second)
        assert 0 < stage.median < 1e12
    # What is taken to the device are batches of the schema's shape.
    assert all(batch.ids.shape == (512, 8) and batch.dense.shape == (512, 3) for batch in taken)
    assert "histories cut" in stages[names.index("batch")].what


def test_a_slow_stage_is_seen(datasets, monkeypatch):
    """A stage that is made slower by a known time loses that time, and the others do not."""
    import time

    true = input_stages.pack

    def slow(*arguments):
        time.sleep(0.02)
        true(*arguments)

    monkeypatch.setattr(input_stages, "pack", slow)
    stages = input_stages.measure(datasets["memory"], 512, jax.device_put, threads=1, samples=1, seconds=0.05)
    by_name = {stage.name: stage.median for stage in stages}
    assert by_name["shuffle"] < 8192 / 0.02
    assert min(by_name, key=lambda name: by_name[name] if name != "together" else np.inf) == "shuffle"


def test_the_command(command, tmp_path):
    process = command(
        "jaxrec.profile", "--config=dlrm_synthetic", "--set=data.train_rows=40000", "--batch_size=512", "--samples=2",
        "--seconds=0.02", f"--data_dir={tmp_path}",
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    lines = out.splitlines()
    rates = json.loads(lines[-1])
    assert list(rates) == ["read", "shuffle", "batch", "transfer", "together"]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in rates.values())
    assert any(line.startswith("slowest     ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--stages=none"], "--stages is 'none', but must be one of: input, step, all"),
        (["--samples=0"], "--samples is 0, but must be at least 1"),
        (["--seconds=0"], "--seconds is 0.0, but must be greater than 0"),
        (["--threads=-1"], "--threads is -1, but must be at least 1"),
        (["--config=none"], "--config is 'none', but must be one of"),
    ],
)
def test_wrong_flags(command, flags, says):
    process = command("jaxrec.profile", "--config=dlrm_synthetic", *flags)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith(f"error: {says}") and err.count("\n") == 1
