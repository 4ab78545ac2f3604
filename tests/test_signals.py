"""SIGTERM and Ctrl-C: finish the step, save, say so, exit with 143 and 130; the same command goes on from there."""

import json
import os
import re
import signal
import threading

import pytest
from test_resume import assert_same_run, lines, logged, progress_of, quiet, steps_of, wait_for

from jaxrec import flags
from jaxrec.training import loop
from jaxrec.training.checkpoint import Checkpoints
from jaxrec.training.loop import train
from jaxrec.training.signals import StopRequest

pytestmark = pytest.mark.usefixtures("compile_cache")
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
both = pytest.mark.parametrize("number", STATUS, ids=lambda s: s.name)


@pytest.fixture(autouse=True)
def handlers():
    """Puts the process's handlers back."""
    before = {number: signal.getsignal(number) for number in STATUS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@both
def test_a_running_command_saves_and_the_same_finishes(number, command, train_flags, straight, tiny, tmp_path):
    command_flags = train_flags(tmp_path)
    running = command("jaxrec.train", *command_flags, slow=(0.25, 9))
    wait_for(lambda: logged(tmp_path, 8), running)
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == STATUS[number], err
    assert "Traceback" not in err
    assert out == ""
    stopped = re.search(rf"stopped     by signal {int(number)} after step (\d+); the same command continues", err)
    assert stopped, err
    step = int(stopped[1])
    assert 8 <= step < 20
    assert steps_of(tmp_path)[-1] == step
    assert progress_of(tmp_path, tiny(), step).batches == step
    assert not (tmp_path / "summary.json").exists()

    again = command("jaxrec.train", *command_flags)
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert f"resumed     from step {step}" in err
    assert_same_run(tmp_path, straight, tiny())


def send(number: int):
    """Returns a function that sends this process a signal, then calls what it is given."""

    def sending(function):
        def wrapped(*args, **kwargs):
            os.kill(os.getpid(), number)
            return function(*args, **kwargs)

        return wrapped

    return sending


@both
def test_before_the_first_step_there_is_nothing_to_save(number, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "shard_train_step", send(number)(loop.shard_train_step))
    monkeypatch.setattr("sys.argv", ["train"])
    with pytest.raises(SystemExit) as end:
        flags.run_command(lambda: train(tiny(), quiet(tmp_path))[1], lambda: None)
    assert end.value.code == STATUS[number]
    assert "Traceback" not in capsys.readouterr().err
    assert steps_of(tmp_path) == []
    assert not (tmp_path / "config.json").exists()


@both
def test_during_an_evaluation(number, tiny, tmp_path, monkeypatch):
    config = tiny("training.steps=20", "training.eval_every=4")
    train(config, quiet(tmp_path / "straight"))
    evaluate = loop._Run._evaluate

    def stopped_at_8(self, state, progress, step):
        if step == 8:
            os.kill(os.getpid(), number)
        evaluate(self, state, progress, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_evaluate", stopped_at_8)
        assert train(config, quiet(tmp_path / "run"))[1] == STATUS[number]
    assert steps_of(tmp_path / "run")[-1] == 8
    assert progress_of(tmp_path / "run", config, 8).evaluated_step == 4
    assert [line["step"] for line in lines(tmp_path / "run", "validation")] == [4]
    assert train(config, quiet(tmp_path / "run"))[1] == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=20)


def test_an_evaluation_that_no_checkpoint_knows_of_is_not_logged_twice(tiny, tmp_path, monkeypatch):
    """Stopped before the evaluation of step 4, killed after it: the log has it once."""
    config = tiny("training.steps=20", "training.eval_every=4", "training.checkpoint_every=0")
    train(config, quiet(tmp_path / "straight"))
    evaluate, run_step = loop._Run._evaluate, loop.StepTracer.before

    def stopped_at_4(self, state, progress, step):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        evaluate(self, state, progress, step)

    def killed_at_6(self, step):
        if step == 6:
            raise MemoryError
        run_step(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_evaluate", stopped_at_4)
        assert train(config, quiet(tmp_path / "run"))[1] == 143
    with monkeypatch.context() as patch:
        patch.setattr(loop.StepTracer, "before", killed_at_6)
        with pytest.raises(MemoryError):
            train(config, quiet(tmp_path / "run"))
    assert [line["step"] for line in lines(tmp_path / "run", "validation")] == [4]
    assert train(config, quiet(tmp_path / "run"))[1] == 0
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=20)


def test_the_last_checkpoint_knows_the_last_evaluation(tiny, tmp_path, monkeypatch):
    """Stopped at the last step before its evaluation: the next call evaluates, and keeps what it finds."""
    config = tiny("training.steps=8", "training.eval_every=4", "training.log_every=4")
    evaluate = loop._Run._evaluate

    def stopped_at_8(self, state, progress, step):
        if step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        evaluate(self, state, progress, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_evaluate", stopped_at_8)
        assert train(config, quiet(tmp_path))[1] == 143
    summary, status = train(config, quiet(tmp_path))
    progress = progress_of(tmp_path, config, 8)
    assert (status, progress.evaluated_step, progress.best_step) == (0, 8, summary["best_step"])


def test_during_a_save(tiny, tmp_path, monkeypatch):
    """It is done, and then the step that was reached meanwhile is saved."""
    config = tiny("training.steps=12", "training.eval_every=100", "training.checkpoint_every=4")
    train(config, quiet(tmp_path / "straight"))
    rename, before, poll = os.rename, loop.StepTracer.before, StopRequest.poll
    sent, noticed = threading.Event(), threading.Event()

    def committed(source, target, **folders):
        if os.fsdecode(target).endswith("checkpoints/4"):
            os.kill(os.getpid(), signal.SIGTERM)
            sent.set()
            assert noticed.wait(60)
        rename(source, target, **folders)

    def waiting_at_5(self, step):
        assert step != 5 or sent.wait(60)
        before(self, step)

    def polled(self):
        if self.received:
            noticed.set()
        return poll(self)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", committed)
        patch.setattr(loop.StepTracer, "before", waiting_at_5)
        patch.setattr(StopRequest, "poll", polled)
        assert train(config, quiet(tmp_path / "run"))[1] == 143
    assert noticed.is_set()
    *_, last = steps_of(tmp_path / "run")
    assert 4 < last < 12
    assert progress_of(tmp_path / "run", config, last).batches == last
    assert train(config, quiet(tmp_path / "run"))[0]["steps_this_process"] == 12 - last
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=12)


@pytest.mark.parametrize("phase", ["restore", "compile"])
def test_while_a_run_is_being_resumed(phase, tiny, tmp_path, monkeypatch):
    """It ends at once; what is saved stays as it is."""
    config = tiny("training.steps=12", "training.eval_every=4")
    train(config, quiet(tmp_path / "straight"))
    train(tiny("training.steps=8", "training.eval_every=4"), quiet(tmp_path / "run"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    where, name = {"restore": (Checkpoints, "restore"), "compile": (loop, "shard_train_step")}[phase]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, send(signal.SIGTERM)(getattr(where, name)))
        patch.setattr("sys.argv", ["train"])
        with pytest.raises(SystemExit) as end:
            flags.run_command(lambda: train(config, quiet(tmp_path / "run"))[1], lambda: None)
    assert end.value.code == 143
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    assert train(config, quiet(tmp_path / "run"))[0]["steps_this_process"] == 4
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=12)


def test_during_the_final_evaluation(tiny, tmp_path, monkeypatch):
    config = tiny("training.steps=10")
    run = loop.Evaluator.run

    def stopped_on_test(self, state, split, stop=None):
        if split == "test":
            os.kill(os.getpid(), signal.SIGINT)
        return run(self, state, split, stop)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Evaluator, "run", stopped_on_test)
        assert train(config, quiet(tmp_path))[1] == 130
    assert not (tmp_path / "summary.json").exists()
    summary, status = train(config, quiet(tmp_path))
    assert (status, summary["steps_this_process"]) == (0, 0)
    assert json.loads((tmp_path / "summary.json").read_text())["metrics"]["test"]["rows"] == 1500


def test_a_second_ctrl_c_interrupts():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, stop.exit_status) == (signal.SIGTERM, 143)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_status) == (0, 0)
