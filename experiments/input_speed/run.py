"""How fast are tables prepared, and batches made of them?

    python -m experiments.input_speed.run --mode=all

Every figure is of a command of jaxrec in a process of its own: `jaxrec.prepare` on generated text in the form of
Criteo's (its peak memory is what the system reports at its end), `jaxrec.profile --stages=input` on what was prepared,
and `jaxrec.train`. Figures for one core are of a process that may use one core only.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments import study
from experiments.input_speed.report import figures, render
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError
from jaxrec.reporting import record as record_lib

STUDY = "input_speed"
HISTORY_SCHEMA = """\
name = "history"
[split]
by = "order"
validation = 0.01
test = 0.01
[columns]
click = {use = "label"}
user = {use = "user"}
time = {use = "time"}
item = {use = "categorical", history = 50, min_count = 1}
"""


class Sizes(NamedTuple):
    """How much is measured.

    Attributes:
      long: Rows of the long text.
      short: Rows of the text that is prepared on one core, and that batches are made of.
      events: Rows of the table with a history.
      repeats: Of what is not sampled within a command.
      seconds: Of a sample of the profile.
      steps: Of the training run on Criteo's rows.
      whole: Whether the default run is trained to its end.
    """

    long: int = 20_000_000
    short: int = 2_000_000
    events: int = 2_000_000
    repeats: int = 3
    seconds: float = 2.0
    steps: int = 150
    whole: bool = True


class Ran(NamedTuple):
    """A command that has ended: the JSON of its last line, and its peak memory in GiB."""

    said: Any
    peak_gib: float


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_string("scratch", None, "Folder for some 12 GB of generated data; else a temporary one.")


def main() -> int:
    """Runs the study; returns the exit status."""
    small = Sizes(long=30_000, short=20_000, events=20_000, repeats=1, seconds=0.05, steps=5, whole=False)
    return study.run(measure=lambda: measure(Sizes()), smoke=lambda: measure(small), render=render, figures=figures)


def measure(sizes: Sizes) -> dict[str, Any]:
    """Runs all commands; returns the record."""
    with tempfile.TemporaryDirectory(dir=flags.FLAGS.scratch) as folder:
        return _measure(sizes, Path(folder))


def _measure(sizes: Sizes, folder: Path) -> dict[str, Any]:
    rows = []
    data = f"--data_dir={folder / 'data'}"
    core = {sorted(os.sched_getaffinity(0))[-1]}

    def add(name: str, case: str, metric: str, unit: str, samples: list[float]) -> None:
        rows.append(record_lib.row(name, "jax", case, metric, unit, samples))
        print(f"{name}, {case}: {np.median(samples):,.4g} {unit}")

    short, long, events = folder / "short.txt", folder / "long.txt", folder / "events.csv"
    _write_text(short, sizes.short)
    for vocabulary in ("frequency", "hash"):
        rates = []
        for _ in range(sizes.repeats):
            shutil.rmtree(folder / "data", ignore_errors=True)
            flags_of = [f"--vocabulary={vocabulary}", "--max_table_rows=1000000", "--name=short", "--threads=1"]
            ran = _run("jaxrec.prepare", "--dataset=criteo", f"--input={short}", data, *flags_of, cores=core)
            rates.append(ran.said["rows_out"] / ran.said["seconds"])
        add("Criteo text prepared", f"one core, {vocabulary}", "rate", "rows/s", rates)
    _run("jaxrec.prepare", "--dataset=criteo", f"--input={short}", data, "--name=short_none", "--compression=none")
    shutil.rmtree(folder / "data" / "short-1.0.0")
    ran = _run("jaxrec.prepare", "--dataset=criteo", f"--input={short}", data, "--name=short")
    bytes_per_row = ran.said["bytes"] / ran.said["rows_out"]
    _write_events(events, sizes.events)
    (folder / "events.toml").write_text(HISTORY_SCHEMA)
    _run("jaxrec.prepare", "--dataset=tabular", f"--input={events}", f"--schema={folder / 'events.toml'}", data)

    profiles = {
        "13 floats, 26 ids": ["--config=dlrm_criteo", "--set=data.table=short"],
        "13 floats, 26 ids, not compressed": ["--config=dlrm_criteo", "--set=data.table=short_none"],
        "a history of 50": ["--config=dlrm_tabular", "--set=data.table=history"],
    }
    sampling = ["--threads=1", f"--seconds={sizes.seconds}", "--batch_size=4096"]
    for case, of_case in profiles.items():
        for stage, samples in _run("jaxrec.profile", *of_case, *sampling, data, cores=core).said.items():
            add(stage, case, "rate", "rows/s", samples)

    steps = [f"--steps={sizes.steps}", "--eval_every=0", "--checkpoint_every=0"]
    trained = {
        "default MovieLens": ["--config=dlrm_movielens", *([] if sizes.whole else steps)],
        "Criteo": ["--config=dlrm_criteo", "--set=data.table=short", data, *steps],
    }
    for case, of_case in trained.items():
        shares = []
        for i in range(sizes.repeats):
            workdir = folder / f"run_{case.split()[0]}_{i}"
            _run("jaxrec.train", *of_case, f"--workdir={workdir}", is_json=False)
            summary = json.loads((workdir / "summary.json").read_text())
            shares.append(100 * summary["stage_shares"]["input"])
        add("training waits for input", case, "share", "%", shares)

    shutil.rmtree(folder / "data")
    _write_text(long, sizes.long)
    ran = _run("jaxrec.prepare", "--dataset=criteo", f"--input={long}", data, "--name=long")
    add("Criteo text prepared", "all cores, long", "rate", "rows/s", [ran.said["rows_out"] / ran.said["seconds"]])
    add("Criteo text prepared", "all cores, long", "peak memory", "GiB", [ran.peak_gib])
    return record_lib.make(
        STUDY, rows, sizes=sizes._asdict(), bytes_of_long=long.stat().st_size, bytes_per_row=bytes_per_row
    )


def _run(module: str, *arguments: str, cores: set[int] | None = None, is_json: bool = True) -> Ran:
    """Runs a command to its end, on these cores.

    Raises:
      UserError: It failed.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cores or allowed)  # A process inherits it.
            process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=out, stderr=errors)
        finally:
            os.sched_setaffinity(0, allowed)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            said = (errors.read().strip().splitlines() or ["nothing"])[-1]
            raise UserError(f"python -m {module} {' '.join(arguments)} ended with {process.returncode}: {said}")
        said = json.loads(out.read().strip().splitlines()[-1]) if is_json else None
    return Ran(said, usage.ru_maxrss / 2**20)


def _write_text(path: Path, rows: int) -> None:
    """Writes text in a process of its own: a child's peak memory is at least that of this process when it began."""
    code = "import sys; from pathlib import Path; from experiments.input_speed.criteo_text import write; "
    code += "write(Path(sys.argv[1]), int(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, str(path), str(rows)], check=True)


def _write_events(path: Path, rows: int) -> None:
    """Writes clicks of users, in the order of time."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, max(rows // 100, 1), rows), (rng.zipf(1.3, rows) % 50_000)
    columns: Mapping[str, np.ndarray] = {
        "click": (rng.random(rows) < 0.3).astype(int), "user": users, "time": np.arange(rows), "item": items,
    }  # fmt: skip
    with path.open("w") as file:
        file.write(",".join(columns) + "\n")
        np.savetxt(file, np.stack(list(columns.values()), axis=1), "%d", delimiter=",")


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
