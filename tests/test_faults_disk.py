"""A disk that is full, and one that has changed a byte: said in a sentence, and what was saved before is as good."""

import contextlib
import random
import resource
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import SHORT
from cover import FULL
from test_resume import assert_same_run, quiet, steps_of

from jaxrec.checks import UserError
from jaxrec.training import setup
from jaxrec.training.checkpoint import PROGRESS_FILE, Checkpoints, Progress, to_arrays
from jaxrec.training.loop import train
from jaxrec.training.writers import MetricWriter

pytestmark = pytest.mark.usefixtures("compile_cache")

# --- A full disk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Writes beyond fail, as on a full disk, be they Python's or TensorStore's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# What is the first that does not fit: any file, the metadata of the arrays, the arrays.
@pytest.mark.parametrize("size", [0, 2000, 20000])
def test_a_save_that_does_not_fit(size, short, tmp_path, refused, monkeypatch):
    config, straight = short
    save = Checkpoints.save
    with contextlib.ExitStack() as full:

        def full_at_8(self, program, state, progress, identity):
            self.wait()
            if int(state.step) == 8:
                full.enter_context(files_of_at_most(size))
            return save(self, program, state, progress, identity)

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "save", full_at_8)
            # The log does not fit either; that is another test's.
            patch.setattr(MetricWriter, "write", lambda *_: None)
            said = refused(config, tmp_path)
    assert f"could not be written to {tmp_path}/checkpoints: " in said
    assert "File too large" in said and "checkpoint 4 is whole: make room" in said
    assert steps_of(tmp_path) == [4]
    (tmp_path / "metrics.jsonl").write_text("".join((straight / "metrics.jsonl").read_text().splitlines(True)[:2]))
    assert train(config, quiet(tmp_path))[0]["steps_this_process"] == 8
    assert_same_run(tmp_path, straight, config, step=12)


def test_too_little_room_is_noticed_before_anything_is_written(short, tmp_path, refused, monkeypatch):
    config, straight = short
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0 if steps_of(tmp_path) else 2**30))
        said = refused(config, tmp_path)
    assert "and 0 are free; checkpoint 4 is whole: make room" in said
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]
    assert train(config, quiet(tmp_path))[0]["steps_this_process"] == 8
    assert_same_run(tmp_path, straight, config, step=12)


def test_a_log_that_does_not_fit(short, tmp_path, refused, monkeypatch):
    """Half a line of step 8 is written."""
    config, straight = short
    write = MetricWriter.write
    with contextlib.ExitStack() as full:

        def full_at_8(self, step, kind, values):
            if (step, kind) == (8, "train"):
                while 4 not in steps_of(tmp_path):  # That it is being saved is another test's.
                    threading.Event().wait(0.01)
                full.enter_context(files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 10))
            write(self, step, kind, values)

        with monkeypatch.context() as patch:
            patch.setattr(MetricWriter, "write", full_at_8)
            said = refused(config, tmp_path)
    assert f"{tmp_path}/metrics.jsonl" in said and "(File too large): make room" in said
    assert lines_of_text(tmp_path)[-1] == '{"step": 8'
    assert steps_of(tmp_path) == [4]
    assert train(config, quiet(tmp_path))[0]["steps_this_process"] == 8
    assert_same_run(tmp_path, straight, config, step=12)


def lines_of_text(workdir: Path) -> list[str]:
    return (workdir / "metrics.jsonl").read_text().splitlines()


# --- A changed byte --------------------------------------------------------------------------------------------------


def restored(workdir: Path, config, program, state, step: int) -> tuple[Progress, dict[str, np.ndarray]]:
    checkpoints = Checkpoints(str(workdir), 1, for_training=False)
    try:
        assert step in checkpoints.steps
        progress = checkpoints.progress(step, config.identity())
        return progress, to_arrays(program, checkpoints.restore(program, state, step))
    finally:
        checkpoints.close()


def test_a_changed_bit_is_found_or_does_not_matter(short, tmp_path):
    """In every file of a checkpoint."""
    config, straight = short
    folder = Path(shutil.copytree(straight, tmp_path / "run")) / "checkpoints" / "12"
    program, dense = setup.build_program(config, config.data.open(""))
    state = setup.initial_state(program, dense)
    checkpoints = Checkpoints(str(tmp_path / "run"), 1, for_training=False)
    # Progress that was made after the save lies in a file of its own.
    checkpoints.save(program, checkpoints.restore(program, state, 12), Progress(12, 12, 12, 0.5), config.identity())
    progress, arrays = restored(tmp_path / "run", config, program, state, 12)
    assert progress == Progress(12, 12, 12, 0.5)
    draw, found = random.Random(0), {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        whole = path.read_bytes()
        for place in range(len(whole)) if FULL else draw.sample(range(len(whole)), min(len(whole), 8)):
            changed = bytearray(whole)
            changed[place] ^= 1 << draw.randrange(8)
            path.write_bytes(changed)
            try:
                other_progress, other = restored(tmp_path / "run", config, program, state, 12)
            except UserError as e:
                message = str(e)
                assert "\n" not in message and f"{folder}" in message and "delete th" in message, (name, place, message)
                found[name] = found.get(name, 0) + 1
                continue
            assert other_progress == progress, (name, place)
            assert other.keys() == arrays.keys(), (name, place)
            for key, array in arrays.items():
                assert array.dtype == other[key].dtype, (name, place, key)
                assert array.tobytes() == other[key].tobytes(), (name, place, key)
        path.write_bytes(whole)
    assert found[PROGRESS_FILE] == found["state/manifest.ocdbt"] and found["_CHECKPOINT_METADATA"]
    assert any(name.startswith("state/ocdbt.process_0/d/") for name in found), "no array was changed"


def test_a_damaged_checkpoint_is_named_and_an_earlier_one_is_used_once_it_is_deleted(tiny, tmp_path, refused):
    more = tiny(*SHORT, "training.steps=16")
    train(more, quiet(tmp_path / "straight"))
    train(tiny(*SHORT, "training.keep_last=2"), quiet(tmp_path / "run"))
    folder = tmp_path / "run" / "checkpoints" / "12"
    arrays = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    changed = bytearray(arrays.read_bytes())
    changed[len(changed) // 2] ^= 1
    arrays.write_bytes(changed)
    said = refused(more, tmp_path / "run")
    # Whether TensorStore or our checksum notices it depends on where in its format that byte lies.
    assert f"checkpoint {folder} cannot be read (" in said
    assert "); delete that folder (8 is then the newest)" in said
    assert steps_of(tmp_path / "run") == [8, 12]
    shutil.rmtree(folder)
    assert train(more, quiet(tmp_path / "run"))[0]["steps_this_process"] == 8
    assert_same_run(tmp_path / "run", tmp_path / "straight", more, step=16)
