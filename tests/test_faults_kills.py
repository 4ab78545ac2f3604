"""A run that is killed at whichever change of its folder: what was saved is not lost, and the next call ends alike."""

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import SHORT
from cover import FULL
from killed_run import kind
from test_resume import assert_same_run, quiet, steps_of

from jaxrec.training import loop
from jaxrec.training.loop import train

pytestmark = [
    pytest.mark.usefixtures("compile_cache"),
    pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="a folder's path is found by its descriptor"),
]


@pytest.fixture(scope="module")
def runs(environment: dict[str, str], cache_folder: Path) -> Iterator[Callable]:
    """Returns `runs(workdirs, log folder, ats)`: starts runs one after the other, and yields their exit statuses."""
    tests = Path(__file__).parent
    with subprocess.Popen(
        [sys.executable, str(tests / "killed_run.py"), str(cache_folder)], env=environment, cwd=tests, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None

        def start(asked: Sequence[tuple[Path, tuple[str, int] | None]]) -> Iterator[int]:
            for workdir, at in asked:
                line = {"workdir": str(workdir), "assignments": SHORT, "at": at, "log": f"{workdir}.log"}
                print(json.dumps(line), file=process.stdin, flush=True)
            for _ in asked:
                yield int(process.stdout.readline())

        yield start
        process.stdin.close()


def chosen(changes: list[str], within: str) -> list[tuple[str, int]]:
    """Returns (kind, n): of each kind that matches `within` the middle one, or with JAXREC_FULL=1 every change."""
    counts = collections.Counter(map(kind, changes))
    if FULL:
        return [(of, n) for of, count in counts.items() for n in range(count)]
    return [(of, count // 2) for of, count in counts.items() if re.search(within, of)]


def log_of(workdir: Path, of: str = "") -> list[str]:
    return [line for line in Path(f"{workdir}.log").read_text().splitlines() if line.startswith(of)]


def check_kills(runs, short, before: Path | None, folder: Path, within: str) -> set[str]:
    """Kills the run that begins in a copy of `before`, at the changes `chosen`; returns the kinds of them."""
    config, straight = short

    def begun(name: str) -> Path:
        if before is not None:
            shutil.copytree(before, folder / name)
        return folder / name

    assert list(runs([(begun("whole"), None)])) == [0]
    assert_same_run(folder / "whole", straight, config, step=12)
    changes = [line for line in log_of(folder / "whole") if not line.startswith("saved")]
    at = chosen(changes, within)
    killed = [(begun(f"killed_{i}"), place) for i, place in enumerate(at)]
    for (workdir, place), status in zip(killed, runs(killed), strict=True):
        if FULL and status == 0 and place[0] == "os.remove /checkpoints/N/*":
            continue  # TensorStore does not always write as many files.
        assert status == -signal.SIGKILL, place
        saved = max((int(line.split()[1]) for line in log_of(workdir, "saved")), default=0)
        assert max(steps_of(workdir), default=0) >= saved, place
        summary, _ = train(config, quiet(workdir))
        assert summary["steps_this_process"] <= 12 - saved, place
        assert_same_run(workdir, straight, config, step=12)
        assert sorted(os.listdir(workdir / "checkpoints")) == sorted(os.listdir(straight / "checkpoints")), place
    return {of for of, _ in at}


def test_at_each_change_of_a_save(runs, short, tmp_path):
    kinds = check_kills(runs, short, None, tmp_path, within="/checkpoints/N")
    # What makes a checkpoint be one, and then the earlier one be none.
    assert {"os.rename /checkpoints/N", "os.rmdir /checkpoints/N", "os.remove /checkpoints/N/*"} <= kinds
    assert "open /checkpoints/N.orbax-checkpoint-tmp/*" in kinds


def test_at_each_change_of_a_run_that_continues_a_killed_one(runs, short, tmp_path):
    """Of which the third save had begun, and the deletion of the first was not done."""
    before = tmp_path / "before"
    # In the third save: its arrays are written, and it is no checkpoint yet.
    assert list(runs([(before, ("os.rename /checkpoints/N.orbax-checkpoint-tmp/*", 2))])) == [-signal.SIGKILL]
    assert sorted(os.listdir(before / "checkpoints")) == ["12.orbax-checkpoint-tmp", "8"]
    (before / "checkpoints" / "4" / "state").mkdir(parents=True)
    within = r"^os.rm.*tmp|rmdir /checkpoints/N$|metrics"
    kinds = check_kills(runs, short, before, tmp_path, within)
    assert {"os.rmdir /checkpoints/N.orbax-checkpoint-tmp", "os.rmdir /checkpoints/N"} <= kinds
    assert "os.rename /metrics.jsonl" in kinds


def test_at_each_change_of_a_run_that_had_only_to_evaluate(runs, short, tmp_path, monkeypatch):
    """Its last checkpoint is there, and learns what the last evaluation has found."""
    config, _ = short
    evaluate = loop._Run._evaluate

    def stopped_at_12(self, state, progress, step):
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        evaluate(self, state, progress, step)

    before = tmp_path / "before"
    with monkeypatch.context() as patch:
        patch.setattr(loop._Run, "_evaluate", stopped_at_12)
        assert train(config, quiet(before))[1] == 143
    assert 12 in steps_of(before)
    kinds = check_kills(runs, short, before, tmp_path, within="(open|rename) .*N/|rmdir /checkpoints/N$")
    assert "os.rename /checkpoints/N/*" in kinds
