"""A run that ends anyhow and is called again is the run that never ended."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.configs import overrides
from jaxrec.training import loop, setup, workdir
from jaxrec.training.checkpoint import Checkpoints, Progress, to_arrays
from jaxrec.training.loop import Options, train

pytestmark = pytest.mark.usefixtures("compile_cache")


def quiet(folder, **options) -> Options:
    return Options(str(folder), "", quiet=True, **options)


def lines(folder: Path, kind: str | None = None) -> list[dict]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if kind in (None, line["kind"])]


def without_times(found: list[dict]) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in ("samples_per_second", "input_share")} for line in found]


def steps_of(folder: Path) -> list[int]:
    return Checkpoints(str(folder), 1, for_training=False).steps


def progress_of(folder: Path, config, step: int) -> Progress:
    return Checkpoints(str(folder), 1, for_training=False).progress(step, config.identity())


def arrays_of(folder: Path, config, step: int) -> dict[str, np.ndarray]:
    """A checkpoint's logical arrays."""
    program, dense = setup.build_program(config, config.data.open(""))
    state = setup.initial_state(program, dense)
    return to_arrays(program, Checkpoints(str(folder), 1, for_training=False).restore(program, state, step))


def assert_same_run(ours: Path, theirs: Path, config, step: int = 40) -> None:
    """Bit for bit: every array of the checkpoint, every metric of the log."""
    a, b = arrays_of(ours, config, step), arrays_of(theirs, config, step)
    assert a.keys() == b.keys()
    assert len(a) > 10
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name
    assert without_times(lines(ours)) == without_times(lines(theirs))
    assert progress_of(ours, config, step) == progress_of(theirs, config, step)


def wait_for(condition, process, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.002)


def logged(folder: Path, step: int) -> bool:
    path = folder / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def test_kill_and_the_identical_command_equal_a_straight_run(command, train_flags, straight, tiny, tmp_path):
    flags = train_flags(tmp_path)
    killed = command("jaxrec.train", *flags, slow=(60, 28))
    # Past the checkpoint, so that a line beyond it is there to be cut; its window began before the checkpoint.
    wait_for(lambda: logged(tmp_path, 24) and 20 in steps_of(tmp_path), killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=10)
    assert killed.returncode == -signal.SIGKILL
    assert max(steps_of(tmp_path)) == 20
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write('{"step": 25, "kind": "tr')

    again = command("jaxrec.train", *flags)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert "resumed     from step 20" in err
    assert_same_run(tmp_path, straight, tiny())
    assert [line["step"] for line in lines(tmp_path, "train")] == [8, 16, 24, 32, 40]
    assert [line["step"] for line in lines(tmp_path, "validation")] == [10, 20, 30, 40]
    ours, theirs = (json.loads((f / "summary.json").read_text()) for f in (tmp_path, straight))
    assert ours["metrics"] == theirs["metrics"]
    assert ours["best_step"] == theirs["best_step"]
    assert (ours["steps"], ours["steps_this_process"]) == (40, 20)


def test_kill_during_a_save_leaves_the_earlier_checkpoint(command, train_flags, tiny, tmp_path):
    big = ("data.rows=500000", "data.tables=2", "training.eval_every=0", "training.checkpoint_every=5")
    flags = train_flags(tmp_path, *(f"--set={a}" for a in big))
    folder = tmp_path / "checkpoints"
    killed = command("jaxrec.train", *flags, slow=(60, 11))
    wait_for(lambda: any(p.name.startswith("10") for p in (folder.iterdir() if folder.exists() else ())), killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=10)
    assert "5" in os.listdir(folder)
    assert "10" not in os.listdir(folder), "the save was done before the kill"
    assert steps_of(tmp_path) == [5]
    config = tiny(*big, "training.steps=12")
    assert int(arrays_of(tmp_path, config, 5)["step"]) == 5
    assert any(p.name.startswith("10") for p in folder.iterdir()), "evaluation must leave a save in progress alone"
    summary, status = train(config, quiet(tmp_path))
    assert (status, summary["steps"], summary["steps_this_process"]) == (0, 12, 7)
    assert sorted(os.listdir(folder)) == ["10", "12"]


def test_several_resumes_equal_a_straight_run(tiny, tmp_path):
    train(tiny(), quiet(tmp_path / "straight"))
    for steps in (10, 20, 20, 30, 40):
        config = tiny(f"training.steps={steps}", "training.log_every=5")
        assert train(config, quiet(tmp_path / "pieces"))[1] == 0
    a, b = (arrays_of(tmp_path / name, tiny(), 40) for name in ("straight", "pieces"))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert [line["step"] for line in lines(tmp_path / "pieces", "train")] == list(range(5, 41, 5))
    assert without_times(lines(tmp_path / "pieces", "validation")) == without_times(
        lines(tmp_path / "straight", "validation")
    )


def test_mesh_sharding_and_cadences_may_change(tiny, tmp_path):
    on_8 = tiny("training.steps=20", "mesh.data=2", "mesh.model=4", "embedding.sharding=row")
    train(on_8, quiet(tmp_path / "moved"))
    on_1 = tiny("training.log_every=4", "training.eval_every=40", "training.checkpoint_every=0", "training.keep_last=1")
    summary, status = train(on_1, quiet(tmp_path / "moved"))
    assert (status, summary["mesh"], summary["steps_this_process"]) == (0, "data:1,model:1", 20)
    train(tiny(), quiet(tmp_path / "straight"))
    ours, theirs = (lines(tmp_path / name, "train")[-1] for name in ("moved", "straight"))
    straight = arrays_of(tmp_path / "straight", tiny(), 40)
    for name, array in arrays_of(tmp_path / "moved", on_1, 40).items():
        np.testing.assert_allclose(array, straight[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert ours["step"] == theirs["step"] == 40


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate 0.002 -> 0.5"),
        ("embedding.optimizer.learning_rate=0.5", "embedding.optimizer.learning_rate"),
        ("model.top_mlp=9", "model.top_mlp [8] -> [9]"),
        ("training.seed=4", "seed 3 -> 4"),
        ("training.batch_size=64", "batch_size 128 -> 64"),
        ("data.rows=102", "data.rows 101 -> 102"),
        ("schedule.warmup_steps=6", "schedule.warmup_steps 5 -> 6"),
        ("precision=bfloat16", "precision"),
    ],
)
def test_what_may_not_change(tiny, tmp_path, change, named):
    workdir.claim(str(tmp_path), tiny(), "auto")
    workdir.record(str(tmp_path), tiny())
    with pytest.raises(UserError) as refused:
        train(tiny(change), quiet(tmp_path))
    assert named in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert json.loads((tmp_path / "config.json").read_text())["identity"] == tiny().identity()


@pytest.fixture
def no_training(monkeypatch):
    """Fails where a training step is compiled."""

    def refuse(*_):
        raise AssertionError("a training step was compiled")

    return lambda: monkeypatch.setattr(loop, "shard_train_step", refuse)


def test_resume_auto_must_never(tiny, tmp_path, no_training):
    short = tiny("training.steps=10", "training.checkpoint_every=0")
    with pytest.raises(UserError, match=r"--resume=must, but .* holds no run"):
        train(short, quiet(tmp_path / "run", resume="must"))
    assert not (tmp_path / "run").exists()
    assert train(short, quiet(tmp_path / "run", resume="never"))[1] == 0
    with pytest.raises(UserError, match=r"--resume=never, but .* holds a run already"):
        train(short, quiet(tmp_path / "run", resume="never"))
    longer = tiny("training.steps=12", "training.checkpoint_every=0")
    assert train(longer, quiet(tmp_path / "run", resume="must"))[0]["steps_this_process"] == 2
    longest = tiny("training.steps=14", "training.checkpoint_every=0")
    assert train(longest, quiet(tmp_path / "run"))[0]["steps_this_process"] == 2

    # An emptied folder of checkpoints: `auto` starts from step 0 (in a log without the old lines), `must` does not.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir()
    no_training()
    with pytest.raises(UserError, match=r"--resume=must, but .* holds no checkpoint"):
        train(short, quiet(tmp_path / "run", resume="must"))


def test_an_emptied_folder_of_checkpoints_starts_anew(tiny, tmp_path):
    short = tiny("training.steps=10")
    train(short, quiet(tmp_path))
    before = without_times(lines(tmp_path))
    for step in steps_of(tmp_path):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    assert train(short, quiet(tmp_path))[0]["steps_this_process"] == 10
    assert without_times(lines(tmp_path)) == before


def test_a_finished_run_only_prints_its_summary(tiny, tmp_path, no_training):
    first, _ = train(tiny("training.steps=10"), quiet(tmp_path))
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()}
    no_training()
    begin = time.perf_counter()
    again, status = train(tiny("training.steps=10"), quiet(tmp_path))
    assert time.perf_counter() - begin < 5
    assert status == 0
    assert again == json.loads((tmp_path / "summary.json").read_text()) == first
    assert again["samples_per_second"] > 0
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir() if p.is_file()} == kept
    # Fewer steps than are done is finished, too.
    assert train(tiny("training.steps=5"), quiet(tmp_path))[0] == first
    with pytest.raises(AssertionError, match="compiled"):
        train(tiny("training.steps=11"), quiet(tmp_path))


def test_a_lost_summary_is_made_again(tiny, tmp_path):
    first, _ = train(tiny("training.steps=10"), quiet(tmp_path))
    (tmp_path / "summary.json").unlink()
    again, status = train(tiny("training.steps=10"), quiet(tmp_path))
    assert (status, again["steps_this_process"]) == (0, 0)
    assert again["metrics"] == first["metrics"]
    assert [line["step"] for line in lines(tmp_path, "validation")] == [10]
    (tmp_path / "summary.json").write_text("{half")
    with pytest.raises(UserError, match=r"summary\.json is not JSON"):
        train(tiny("training.steps=10"), quiet(tmp_path))


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the validation NE by a function of the step."""
    run = loop.Evaluator.run

    def install(ne):
        def scripted_run(self, state, split, stop=None):
            values = run(self, state, split, stop)
            return {**values, "ne": ne(int(state.step))} if split == "validation" and values else values

        monkeypatch.setattr(loop.Evaluator, "run", scripted_run)

    return install


def test_keeps_the_last_n_and_the_best(tiny, tmp_path, scripted):
    scripted(lambda step: abs(step - 4) + 0.5)
    config = tiny("training.steps=13", "training.eval_every=2", "training.checkpoint_every=3", "training.keep_last=2")
    summary, _ = train(config, quiet(tmp_path))
    assert steps_of(tmp_path) == [4, 12, 13]
    assert summary["best_step"] == 4
    assert progress_of(tmp_path, config, 13) == Progress(13, 13, 4, 0.5, worse=5, window=(0.0, 0.0, 0.0, 0.0))


def test_stops_early_and_a_resume_neither_forgets_nor_restarts_patience(tiny, tmp_path, scripted, no_training):
    scripted(lambda step: abs(step - 4) + 0.5)
    config = tiny("training.steps=6", "training.eval_every=2", "training.patience=2")
    assert not train(config, quiet(tmp_path))[0]["stopped_early"]
    longer = overrides.apply(config, ["training.steps=1000"])
    summary, status = train(longer, quiet(tmp_path))
    assert (status, summary["steps"], summary["stopped_early"], summary["best_step"]) == (0, 8, True, 4)
    # More patience: there is more to do. The best is that of before.
    patient = overrides.apply(longer, ["training.patience=4"])
    summary, _ = train(patient, quiet(tmp_path))
    assert (summary["steps"], summary["steps_this_process"], summary["best_step"]) == (12, 4, 4)
    assert [line["step"] for line in lines(tmp_path, "validation")] == [2, 4, 6, 8, 10, 12]
    no_training()
    assert train(patient, quiet(tmp_path))[0] == summary


def test_an_undefined_ne_is_never_the_best(tiny, tmp_path, scripted):
    scripted(lambda step: {2: float("nan"), 4: 0.7, 6: float("nan")}[step])
    summary, _ = train(tiny("training.steps=6", "training.eval_every=2"), quiet(tmp_path))
    assert summary["best_step"] == 4


def test_a_deleted_best_checkpoint_is_replaced_by_a_later_one(tiny, tmp_path, scripted):
    scripted(lambda step: abs(step - 4) + 0.5)
    config = tiny("training.steps=8", "training.eval_every=4")
    assert train(config, quiet(tmp_path))[0]["best_step"] == 4
    shutil.rmtree(tmp_path / "checkpoints" / "4")
    summary, status = train(overrides.apply(config, ["training.steps=12"]), quiet(tmp_path))
    assert (status, summary["best_step"], summary["steps"]) == (0, 8, 12)
    assert [line["step"] for line in lines(tmp_path, "validation")] == [4, 8, 12]


def test_a_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    for name, seed in (("a", 3), ("b", 4)):
        train(tiny("training.steps=2", f"training.seed={seed}"), quiet(tmp_path / name))
    shutil.rmtree(tmp_path / "b" / "checkpoints")
    shutil.copytree(tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints")
    with pytest.raises(UserError, match=r"checkpoints/2 is of another run \(seed 3 -> 4\)"):
        train(tiny("training.steps=4", "training.seed=4"), quiet(tmp_path / "b"))


def test_without_config_json_the_checkpoints_decide(tiny, tmp_path):
    train(tiny("training.steps=2"), quiet(tmp_path))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="is of another run"):
        train(tiny("training.steps=4", "training.seed=4"), quiet(tmp_path))
    with pytest.raises(UserError, match="holds a run already"):
        train(tiny("training.steps=4"), quiet(tmp_path, resume="never"))
    assert train(tiny("training.steps=4"), quiet(tmp_path))[0]["steps_this_process"] == 2
    assert (tmp_path / "config.json").exists()


def test_a_second_run_in_the_same_folder_is_refused(command, train_flags, straight, tiny, tmp_path):
    first = command("jaxrec.train", *train_flags(tmp_path), slow=(60, 28))
    wait_for(lambda: logged(tmp_path, 8), first)
    second = command("jaxrec.train", *train_flags(tmp_path))
    _, err = second.communicate(timeout=60)
    assert second.returncode == 2
    assert f"error: --workdir={tmp_path} is in use by a run that has not ended" in err and "Traceback" not in err
    first.kill()  # However it ends, the folder is free.
    first.communicate()
    assert train(tiny(), quiet(tmp_path))[1] == 0
    assert_same_run(tmp_path, straight, tiny())


def test_a_refused_second_run_leaves_the_first_unharmed(tiny, tmp_path, monkeypatch, refused):
    config = tiny("training.steps=12", "training.checkpoint_every=4")
    train(config, quiet(tmp_path / "straight"))
    before, said = loop.StepTracer.before, []

    def second_at_6(self, step):
        if step == 6 and not said:
            said.append("")
            said[0] = refused(config, tmp_path / "run")
        before(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop.StepTracer, "before", second_at_6)
        assert train(config, quiet(tmp_path / "run"))[1] == 0
    assert "is in use by a run that has not ended; stop it, or name another folder" in said[0]
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=12)


def test_a_wrong_flag_does_not_take_the_folder(tiny, tmp_path):
    with pytest.raises(UserError, match="--batch_size is 99999"):
        train(tiny("training.batch_size=99999"), quiet(tmp_path))
    assert train(tiny("training.steps=2"), quiet(tmp_path))[1] == 0


def test_without_periodic_checkpoints_a_kill_restarts_from_the_beginning(tiny, tmp_path, monkeypatch):
    config = tiny("training.checkpoint_every=0", "training.eval_every=0", "training.steps=20")
    train(config, quiet(tmp_path / "straight"))

    def killed(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_evaluate", killed)
        with pytest.raises(MemoryError):
            train(config, quiet(tmp_path / "run"))
    assert steps_of(tmp_path / "run") == []
    assert [line["step"] for line in lines(tmp_path / "run")] == [8, 16, 20]
    assert train(config, quiet(tmp_path / "run"))[1] == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=20)


def test_row_on_8_devices_evaluates_as_replicated_on_2(command, tiny, tmp_path):
    config = tiny("training.steps=20", "mesh.data=2", "mesh.model=4", "embedding.sharding=row")
    summary, _ = train(config, quiet(tmp_path))
    common = ("jaxrec.evaluate", f"--workdir={tmp_path}", "--simulate_cpu_devices=8")
    processes = [command(*common), command(*common, "--mesh=data:1,model:2", "--embedding_sharding=replicated")]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        results.append(json.loads(out))
    row, replicated = results
    assert row["step"] == replicated["step"] == summary["best_step"]
    assert row["split"] == replicated["split"] == "test"
    assert row["rows"] == 1500
    for name, value in summary["metrics"]["test"].items():
        assert row[name] == pytest.approx(value, rel=1e-6), name
        assert replicated[name] == pytest.approx(row[name], rel=1e-6), name
