"""Where does the time of training go: start-up, input, step, evaluation, checkpoint?

    python -m experiments.where_time_goes.run --mode=all

Each stage is measured alone, then the step with its input, then whole runs by `jaxrec.train`, with an empty compile
cache and with the one that the first run left.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import study
from experiments.drawn import Drawn
from experiments.movielens_packages import missing_for_movielens
from experiments.where_time_goes.report import figures, render
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, require
from jaxrec.configs import catalogue, overrides
from jaxrec.data.schema import Dataset
from jaxrec.profiling import input_stages, step_profile
from jaxrec.reporting import record as record_lib
from jaxrec.startup import keep_freed_memory
from jaxrec.training import setup, workdir
from jaxrec.training.checkpoint import Checkpoints, Progress
from jaxrec.training.config import Config
from jaxrec.training.evaluation import Evaluator

STUDY = "where_time_goes"
THREADS = 2


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is profiled.

    Attributes:
      config: Named config.
      changes: Of it, path -> value.
      drawn: Whether its rows are drawn beforehand and kept in memory.
      steps: Of the whole run by `jaxrec.train`; 0: the config's.
    """

    config: str
    changes: Mapping[str, Any]
    drawn: bool
    steps: int


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_integer("samples", 5, "Of each stage.")
    flags.DEFINE_float("seconds", 1.0, "Of a sample, at least.")


def main() -> int:
    """Runs the study; returns the exit status."""
    # Whole runs are processes of their own: this one must leave them a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    samples, seconds = flags.FLAGS.samples, flags.FLAGS.seconds
    require(samples >= 2, f"--samples is {samples}, but must be at least 2")
    require(0 < seconds < 600, f"--seconds is {seconds}, but must be greater than 0 and below 600")
    tiny = {
        "data.train_rows": 4000, "data.validation_rows": 500, "data.test_rows": 500, "data.tables": 3, "data.rows": 300,
        "training.batch_size": 128, "model.bottom_mlp": (8, 16), "model.top_mlp": (16,), "training.eval_every": 0,
    }  # fmt: skip
    return study.run(
        measure=lambda: measure(*subjects(), samples, seconds),
        smoke=lambda: measure([Subject("dlrm_synthetic", tiny, True, 10)], "", 2, 0.02),
        render=render,
        figures=figures,
    )


def subjects() -> tuple[list[Subject], str]:
    """Returns what is profiled, and what takes another's place, as its packages are absent."""
    missing = missing_for_movielens(jaxrec_flags.cache_dir("data"))
    rows = {"data.train_rows": 64 * catalogue.get("dlrm_balanced").training.batch_size}
    balanced = Subject("dlrm_balanced", rows, True, 60)
    if not missing:
        return [Subject("dlrm_movielens", {}, False, 0), balanced], ""
    instead = f"dlrm_synthetic instead of dlrm_movielens: {', '.join(missing)} not installed"
    print(instead, flush=True)
    small = {"data.train_rows": 500_000, "training.steps": 400}
    return [Subject("dlrm_synthetic", small, True, 400), balanced], instead


def measure(chosen: list[Subject], instead: str, samples: int, seconds: float) -> dict[str, Any]:
    """Profiles the subjects; returns the record."""
    keep_freed_memory()
    finished, rows, found = study.finished(), [], {}
    for subject in chosen:
        piece = finished.get(subject.config, lambda s=subject: _profile(s, samples, seconds))
        rows += piece["rows"]
        found[subject.config] = piece["facts"]
    return record_lib.make(
        STUDY, rows, subjects=found, instead=instead, samples=samples, seconds=seconds, threads=THREADS
    )


def _profile(subject: Subject, samples: int, seconds: float) -> dict[str, Any]:
    whole = config = overrides.replace_all(catalogue.get(subject.config), subject.changes)
    if subject.drawn:
        config = dataclasses.replace(config, data=Drawn(config.data))
    try:
        dataset = config.data.open(jaxrec_flags.cache_dir("data"))
    except UserError as e:
        raise UserError(f"{subject.config}: {e}") from e
    rows: list[dict[str, Any]] = []

    def row(name: str, metric: str, unit: str, values: list[float]) -> None:
        rows.append(record_lib.row(name, "jax", subject.config, metric, unit, values))

    put = setup.put_batch(setup.build_program(config, dataset)[0])
    for stage in input_stages.measure(
        dataset, config.training.batch_size, put, threads=THREADS, samples=samples, seconds=seconds
    ):
        row(f"input: {stage.name}", "rate", "rows/s", stage.rows_per_second)
    with tempfile.TemporaryDirectory() as folder:
        profile = step_profile.measure(
            config, dataset, folder, samples=samples, seconds=seconds, traced=5, threads=THREADS
        )
        row("step, batches on the device", "step", "ms", profile.resident_ms)
        row("step with its input", "step", "ms", profile.fed_ms)
        for name, value in _evaluation_and_checkpoint(config, dataset, folder, samples).items():
            row(*name, value)
    facts = profile.as_dict()
    del facts["trace"]
    facts["regions"] = {k: facts["regions"][k] for k in ("devices", "mapped_share", "spanning_share", "total_ms")}
    facts |= {"batch": config.training.batch_size, "rows": dataset.splits["train"].rows}
    print(f"{subject.config}: {profile.verdict.sentence()}", flush=True)
    for cache, values in _whole_runs(subject, whole).items():
        for (name, metric, unit), value in values.items():
            row(f"{name}, {cache} cache", metric, unit, value)
    return {"rows": rows, "facts": facts}


def _evaluation_and_checkpoint(
    config: Config, dataset: Dataset, folder: str, samples: int
) -> dict[tuple[str, str, str], list[float]]:
    """Returns the rates of evaluating the validation split, and the seconds and bytes of checkpoints."""
    program, dense = setup.build_program(config, dataset)
    state = setup.initial_state(program, dense)
    evaluator = Evaluator(config, dataset, program, state)
    count = dataset.splits["validation"].rows
    rates, saving, restoring = [], [], []
    for _ in range(samples + 1):
        rates.append(count / _seconds(lambda: evaluator.run(state, "validation")))
    checkpoints = Checkpoints(str(Path(folder) / "run"), 1)
    identity = setup.identity(config, dataset)
    try:
        for step in range(1, 4):
            state = state._replace(step=state.step + 1)

            def save(state=state, step=step) -> None:
                checkpoints.save(program, state, Progress(step), identity)
                checkpoints.wait()

            saving.append(_seconds(save))
        size = sum(p.stat().st_size for p in Path(folder, "run").rglob("*") if p.is_file())
        for _ in range(2):
            restoring.append(_seconds(lambda: checkpoints.restore(program, state, checkpoints.steps[-1])))
    finally:
        checkpoints.close()
    return {
        ("evaluation", "rate", "rows/s"): rates[1:],
        ("checkpoint: save", "time", "s"): saving,
        ("checkpoint: restore", "time", "s"): restoring,
        ("checkpoint", "size", "MiB"): [size / 2**20 / max(1, len(checkpoints.steps))],
    }


def _seconds(once: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    once()
    return time.perf_counter() - begin


def _whole_runs(subject: Subject, config: Config) -> dict[str, dict[tuple[str, str, str], list[float]]]:
    """Trains by the command, twice: the first run's compile cache is empty, the second has what the first left."""
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            path = Path(folder) / cache
            assigned = [
                f"--set={k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in subject.changes.items()
            ]
            command = [
                sys.executable, "-m", "jaxrec.train", f"--config={config.name}", f"--workdir={path}", *assigned,
                f"--compile_cache={folder}/compiled", *([f"--steps={subject.steps}"] if subject.steps else []),
            ]  # fmt: skip
            begin = time.perf_counter()
            done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
            seconds = time.perf_counter() - begin
            require(done.returncode == 0, f"the run of {config.name} has failed: {done.stderr.strip()[-300:]}")
            summary = json.loads((path / workdir.SUMMARY_FILE).read_text())
            values = {(f"start-up: {k}", "time", "s"): [v] for k, v in summary["startup_seconds"].items()}
            values |= {(f"loop: {k}", "share", "1"): [v] for k, v in summary["stage_shares"].items()}
            loop = summary["seconds"]
            values |= {
                ("loop", "time", "s"): [loop],
                ("run", "time", "s"): [seconds],
                ("run", "effective_training_time", "1"): [loop * summary["stage_shares"]["step"] / seconds],
                ("run", "rate", "samples/s"): [summary["samples_per_second"]],
                ("run", "peak_memory", "GiB"): [summary["peak_memory_bytes"] / 2**30],
                ("run", "test_ne", "1"): [summary["metrics"]["test"]["ne"]],
            }
            runs[cache] = values
    return runs


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
