"""The loop in this process: what it writes, how it fails, what it traces."""

import dataclasses
import gzip
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags as absl_flags
from sklearn.metrics import log_loss, roc_auc_score
from test_resume import arrays_of, lines, progress_of, quiet, steps_of

from jaxrec import flags
from jaxrec import train as train_command
from jaxrec.checks import UserError
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.pipeline import Batches
from jaxrec.data.schema import Dataset
from jaxrec.startup import PHASES, CompileCounter
from jaxrec.training import loop, setup
from jaxrec.training.evaluation import Evaluator
from jaxrec.training.loop import Options, StepRefused, train
from jaxrec.training.step import Program

pytestmark = pytest.mark.usefixtures("compile_cache")


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory, compile_cache):
    """(workdir, summary) of a whole tiny run."""
    workdir = tmp_path_factory.mktemp("loop") / "run"
    summary, status = train(tiny(), quiet(workdir))
    assert status == 0
    return workdir, summary


def test_summary(run):
    workdir, summary = run
    assert json.loads((workdir / "summary.json").read_text()) == summary
    for split, rows in (("validation", 2000), ("test", 1500)):
        assert summary["metrics"][split]["rows"] == rows
        for name in ("auc", "ne", "log_loss", "calibration", "user_auc", "best_ne", "excess"):
            assert np.isfinite(summary["metrics"][split][name]), name
    assert (summary["steps"], summary["steps_this_process"], summary["stopped_early"]) == (40, 40, False)
    assert summary["best_step"] in steps_of(workdir)
    assert summary["samples_per_second"] == pytest.approx(40 * 128 / summary["seconds"])
    shares = summary["stage_shares"]
    assert set(shares) == {"step", "input", "evaluation", "checkpoint", "trace"}
    assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 for share in shares.values())
    assert shares["step"] > 0
    assert shares["evaluation"] > 0
    assert set(summary["startup_seconds"]) == set(PHASES)
    assert all(summary["startup_seconds"][phase] > 0 for phase in ("data", "init", "compile", "first_step"))
    assert summary["recompiles"] == 0
    assert summary["peak_memory_bytes"] > summary["step_memory_bytes"]["argument"] > 0
    assert summary["rows_dropped_per_epoch"] == 20000 % 128
    assert summary["environment"]["versions"]["jax"] == jax.__version__
    assert summary["environment"]["versions"]["python"] == platform.python_version()
    assert summary["mesh"] == "data:1,model:1"


def test_no_file_names_the_host_or_a_path(run):
    workdir, _ = run

    def texts(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield key
                yield from texts(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from texts(inner)
        elif isinstance(value, str):
            yield value

    found = [json.loads((workdir / name).read_text()) for name in ("config.json", "summary.json")]
    for text in texts([*found, lines(workdir)]):
        assert not text.startswith(("/", "~")), text
        assert str(workdir) not in text
        assert text != platform.node()


def test_metrics_and_events(run):
    workdir, summary = run
    train_lines, validation = lines(workdir, "train"), lines(workdir, "validation")
    assert [line["step"] for line in train_lines] == [8, 16, 24, 32, 40]
    assert [line["step"] for line in validation] == [10, 20, 30, 40]
    for line in train_lines:
        assert {"loss", "ne", "calibration", "label_mean", "samples_per_second", "input_share"} < set(line)
        assert 0 <= line["input_share"] <= 1
    best = min(validation, key=lambda line: line["ne"])
    assert best["step"] == summary["best_step"]
    assert best["auc"] == summary["metrics"]["validation"]["auc"]

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(workdir)).Reload()
    assert {"train/loss", "train/ne", "validation/auc", "validation/ne"} <= set(events.Tags()["scalars"])
    for kind, name, found in (("train", "loss", train_lines), ("validation", "auc", validation)):
        scalars = events.Scalars(f"{kind}/{name}")
        assert [(s.step, pytest.approx(s.value, rel=1e-6)) for s in scalars] == [(x["step"], x[name]) for x in found]


def test_events_of_a_resumed_run_have_each_step_once(tiny, tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)  # the name of a file of events holds its second
    for steps in (16, 32):
        train(tiny(f"training.steps={steps}"), quiet(tmp_path))
    monkeypatch.undo()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [s.step for s in events.Scalars("train/loss")] == [8, 16, 24, 32]


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=str)
def test_evaluation_is_over_the_whole_split(mesh, tiny):
    """1500 rows are 11 batches of 128 and one of 92, or one whole batch; scikit-learn agrees on the logits."""
    config = tiny(f"mesh.data={mesh[0]}", f"mesh.model={mesh[1]}", "embedding.init_scale=1")
    dataset = config.data.open("")
    program, dense = setup.build_program(config, dataset)
    state = setup.initial_state(program, dense)
    evaluator = Evaluator(config, dataset, program, state)
    metrics = evaluator.run(state, "test")
    assert metrics is not None
    logits, labels = [], []
    for batch_logits, host in evaluator.predictions(state, "test"):
        keep = host.batch.weight > 0
        logits.append(batch_logits[keep, 0].astype(np.float64))
        labels.append(host.batch.labels[keep, 0])
    assert [len(x) for x in logits] == [128] * 11 + [92]
    probability, label = 1 / (1 + np.exp(-np.concatenate(logits))), np.concatenate(labels)
    mean = label.mean(dtype=np.float64)
    loss = log_loss(label, probability)
    assert metrics["rows"] == 1500
    assert metrics["auc"] == pytest.approx(roc_auc_score(label, probability), abs=1e-9)
    assert metrics["log_loss"] == pytest.approx(loss, rel=1e-7)
    assert metrics["ne"] == pytest.approx(loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)), rel=1e-6)
    assert metrics["calibration"] == pytest.approx(probability.mean() / mean, rel=1e-6)
    whole = tiny("training.eval_batch_size=1500", "embedding.init_scale=1")
    program, dense = setup.build_program(whole, dataset)
    state = setup.initial_state(program, dense)
    at_once = Evaluator(whole, dataset, program, state).run(state, "test")
    assert at_once == pytest.approx(metrics, rel=1e-5)


@dataclasses.dataclass(frozen=True)
class HugeValue:
    """Synthetic rows; one of them holds a dense value that is finite, but whose squares are not."""

    row: int = 2345

    def open(self, data_dir: str) -> Dataset:
        good = SyntheticData(train_rows=4000, validation_rows=500, test_rows=500, tables=3, rows=101, bag=1, dense=4)
        dataset = good.open(data_dir)
        columns = {k: np.array(v) for k, v in dataset.splits["train"][0].items()}
        columns["dense"][self.row] = 3e38
        columns["dense"][self.row, ::2] = -3e38
        return dataclasses.replace(dataset, splits={**dataset.splits, "train": ArrayBlocks(columns, 4000)})


def test_a_step_that_is_not_finite_stops_the_run(tiny, tmp_path):
    """It is noticed before the evaluation of step 10 and the log of step 40, and by a second call again."""
    config = dataclasses.replace(
        tiny("training.log_every=40", "training.eval_every=1000", "training.batch_size=100"), data=HugeValue()
    )
    batches = Batches(config.data.open(""), "train", 100, seed=3)
    (failing,) = [k for k in range(40) if np.abs(batches[k].batch.dense).max() > 1e38]
    assert 1 < failing < 39
    with pytest.raises(StepRefused, match=rf"^step {failing}: (loss|gradient of .*|update of .*) is not finite"):
        train(config, quiet(tmp_path / "run"))
    assert steps_of(tmp_path / "run")[-1] == failing
    assert progress_of(tmp_path / "run", config, failing).batches == failing
    before = arrays_of(tmp_path / "run", config, failing)
    # The state is that of a run of just the steps before.
    limited = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=failing))
    train(limited, quiet(tmp_path / "before"))
    for name, array in arrays_of(tmp_path / "before", config, failing).items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    with pytest.raises(StepRefused, match=f"^step {failing}: "):
        train(config, quiet(tmp_path / "run"))


@dataclasses.dataclass(frozen=True)
class WrongId:
    """Synthetic rows in blocks of 100, of which one holds an id beyond its table while `wrong` is set."""

    wrong = True

    def open(self, data_dir: str) -> Dataset:
        good = SyntheticData(train_rows=4000, validation_rows=500, test_rows=500, tables=3, rows=101, bag=1, dense=4)
        dataset = good.open(data_dir)
        columns = {k: np.array(v) for k, v in dataset.splits["train"][0].items()}
        if WrongId.wrong:
            columns["cat_1"][2345] = 101
        return dataclasses.replace(dataset, splits={**dataset.splits, "train": ArrayBlocks(columns, 100)})


def test_an_id_out_of_range_on_a_mesh_leaves_a_run_that_continues(tiny, tmp_path, monkeypatch):
    config = dataclasses.replace(
        tiny("training.checkpoint_every=4", "training.batch_size=80", "embedding.sharding=row_cyclic",
             "dense_sharding=fsdp", "mesh.data=2", "mesh.model=4"), data=WrongId()
    )  # fmt: skip
    with pytest.raises(UserError, match=r"feature cat_1 holds id 101, but table table_1 has 101 rows, so ids must be"):
        train(config, quiet(tmp_path / "run"))
    saved = steps_of(tmp_path / "run")
    assert saved and max(saved) < 40
    monkeypatch.setattr(WrongId, "wrong", False)
    summary, status = train(config, quiet(tmp_path / "run"))
    assert (status, summary["steps"], summary["steps_this_process"]) == (0, 40, 40 - max(saved))
    train(config, quiet(tmp_path / "straight"))
    straight = arrays_of(tmp_path / "straight", config, 40)
    for name, array in arrays_of(tmp_path / "run", config, 40).items():
        np.testing.assert_array_equal(array, straight[name], err_msg=name)


def test_a_failed_state_is_neither_evaluated_nor_saved_as_a_later_step(tiny, tmp_path):
    config = dataclasses.replace(
        tiny("training.log_every=1000", "training.eval_every=5", "training.batch_size=100"), data=HugeValue()
    )
    batches = Batches(config.data.open(""), "train", 100, seed=3)
    (failing,) = [k for k in range(40) if np.abs(batches[k].batch.dense).max() > 1e38]
    with pytest.raises(StepRefused, match=f"^step {failing}: "):
        train(config, quiet(tmp_path))
    assert all(line["step"] <= failing for line in lines(tmp_path))
    progress = progress_of(tmp_path, config, failing)
    assert progress.batches == failing
    assert max(progress.best_step, progress.evaluated_step) <= failing


def test_the_command_ends_with_1_where_a_step_is_not_finite(tiny, train_flags, tmp_path, monkeypatch, capsys):
    known, handler = set(absl_flags.FLAGS), signal.getsignal(signal.SIGTERM)
    argv = train_flags(tmp_path, "--set=optimizer.learning_rate=1e38", "--set=optimizer.name=sgd")
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    monkeypatch.setattr("jaxrec.startup.enable_compile_cache", lambda _: None)
    try:
        with pytest.raises(SystemExit) as end:
            flags.run_command(train_command.main, flags.define_train)
    finally:
        signal.signal(signal.SIGTERM, handler)
        for name in set(absl_flags.FLAGS) - known:
            delattr(absl_flags.FLAGS, name)
    err = capsys.readouterr().err
    assert end.value.code == 1
    assert "error: step " in err
    assert "is not finite" in err
    assert "Traceback" not in err


def traced(folder: Path) -> list[dict]:
    with gzip.open(folder / "perfetto_trace.json.gz", "rt") as f:
        return json.load(f)["traceEvents"]


def test_profile_steps(tiny, tmp_path):
    summary, _ = train(tiny("training.steps=12"), quiet(tmp_path, profile_steps=(4, 7)))
    assert summary["stage_shares"]["trace"] > 0
    assert summary["recompiles"] == 0
    (folder,) = (tmp_path / "plugins" / "profile").iterdir()
    assert list(folder.glob("*.xplane.pb"))
    events = traced(tmp_path)
    marks = [e for e in events if e.get("name") == "train"]
    assert sorted(int(e["args"]["step_num"]) for e in marks) == [4, 5, 6]
    names = {e.get("name", "") for e in events}
    assert any("dot" in name or "fusion" in name for name in names), "no event of a compiled operation"
    # Where a trace is already running, another cannot start: this one was ended.
    jax.profiler.start_trace(str(tmp_path / "another"))
    jax.profiler.stop_trace()


@pytest.mark.parametrize(("steps", "expected"), [((10, 99), [10, 11]), ((0, 1), [0])], ids=str)
def test_a_window_at_the_ends_of_the_run_closes(steps, expected, tiny, tmp_path, capsys):
    train(tiny("training.steps=12"), Options(str(tmp_path), "", profile_steps=steps))
    marks = [e for e in traced(tmp_path) if e.get("name") == "train"]
    assert sorted(int(e["args"]["step_num"]) for e in marks) == expected
    assert "trace       plugins/profile/" in capsys.readouterr().err


def test_a_window_that_never_comes_is_said(tiny, tmp_path, capsys):
    train(tiny("training.steps=3"), Options(str(tmp_path), "", profile_steps=(50, 60)))
    assert "trace       none: steps 0 to 2 were run, and --profile_steps is 50:60" in capsys.readouterr().err
    assert not (tmp_path / "plugins").exists()


def test_an_error_within_the_window_ends_the_trace(tiny, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(loop.StepTracer, "after", fail)
    with pytest.raises(MemoryError):
        train(tiny("training.steps=3"), quiet(tmp_path, profile_steps=(0, 2)))
    jax.profiler.start_trace(str(tmp_path / "another"))
    jax.profiler.stop_trace()


def test_recompiles_are_counted(tiny, tmp_path, monkeypatch):
    original = loop.StepTracer.before

    def compiling(self, step):
        if step in (5, 6):
            jax.jit(lambda x: x * step)(np.float32(1)).block_until_ready()
        original(self, step)

    monkeypatch.setattr(loop.StepTracer, "before", compiling)
    summary, _ = train(tiny("training.steps=12"), quiet(tmp_path))
    assert summary["recompiles"] == 2


def test_intervals_longer_than_the_run(tiny, tmp_path):
    config = tiny("training.steps=5", "training.log_every=99", "training.eval_every=99", "training.checkpoint_every=99")
    summary, _ = train(config, quiet(tmp_path))
    assert [(line["step"], line["kind"]) for line in lines(tmp_path)] == [(5, "train"), (5, "validation")]
    assert steps_of(tmp_path) == [5]
    assert summary["best_step"] == 5


def test_validation_smaller_than_a_batch(tiny, tmp_path):
    config = tiny("data.validation_rows=37", "data.test_rows=130", "mesh.data=2", "training.steps=2")
    summary, _ = train(config, quiet(tmp_path))
    assert summary["metrics"]["validation"]["rows"] == 37
    assert summary["metrics"]["test"]["rows"] == 130


def test_the_compile_cache_is_filled_and_used(command, train_flags, tmp_path):
    """By the command, in processes of their own: the cache is on without a flag, and `off` turns it off."""
    cache = tmp_path / "compiled"
    hits = []
    for name, where in (("a", cache), ("b", cache), ("c", "off")):
        process = command("jaxrec.train", *train_flags(tmp_path / name, f"--compile_cache={where}", "--steps=2"))
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        hits.append(json.loads((tmp_path / name / "summary.json").read_text())["compile_cache_hits"])
        if name == "a":
            filled = sorted(p for p in os.listdir(cache) if p.endswith("-cache"))
            assert len(filled) > 5
    assert hits[0] < len(filled) // 2
    assert hits[1] >= len(filled)
    assert hits[2] == 0
    assert sorted(p for p in os.listdir(cache) if p.endswith("-cache")) == filled


def test_a_counter_counts_until_it_is_closed():
    counter = CompileCounter()
    jax.jit(lambda x: x + 17)(np.float32(1)).block_until_ready()
    assert counter.count == 1
    counter.close()
    jax.jit(lambda x: x + 18)(np.float32(1)).block_until_ready()
    assert counter.count == 1


def test_the_step_program_is_what_the_summary_measures(run, tiny):
    _, summary = run
    config = tiny()
    dataset = config.data.open("")
    program, dense = setup.build_program(config, dataset)
    assert isinstance(program, Program)
    state, window = setup.initial_state(program, dense), setup.new_window(program)
    shapes = setup.batch_shapes(dataset, 128, program)
    argument = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, window, shapes)))
    assert summary["step_memory_bytes"]["argument"] == pytest.approx(argument, rel=0.05, abs=2048)
