"""How fast are embedding rows looked up and updated? jaxrec's engines, dense JAX, FBGEMM and EmbeddingBag, in turns.

    python -m experiments.embedding_update.run --mode=all
    python -m experiments.embedding_update.run --mode=all --points=64x8x2048 --out=somewhere

Each implementation is a process of its own; at a point they take turns, each in its fastest setting. First all of one
optimizer must end with the same rows, or nothing is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from absl import flags

from experiments import study
from experiments.baselines import installed
from experiments.embedding_update.points import GRID, LAWS, Point, parse
from experiments.embedding_update.report import figures, render
from experiments.embedding_update.sides import STACKS, TORCH, WITH_CHECKS
from experiments.workers import Worker, forth_and_back, worker
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, one_of, require
from jaxrec.reporting import record as record_lib

STUDY = "embedding_update"
# Of the largest change of any row: rows that are lost or counted twice would be of order 1. A frequent row is the sum
# of ten thousand gradients in float32, which each implementation adds in another order.
AGREE = 1e-3
COMPARED_STEPS, TUNING_SAMPLES = 3, 2
WAIT_POLICY = "passive"


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_list("points", list(GRID), "Points, dim x bag x batch.")
    flags.DEFINE_list("ids", list(LAWS), "Laws of the ids: uniform, zipf.")
    flags.DEFINE_list("stacks", None, f"Implementations, of: {'; '.join(STACKS)}; all that are installed.")
    flags.DEFINE_integer("rounds", 5, "Turns of each implementation.")
    flags.DEFINE_float("seconds", 0.3, "Of a turn.")


def main() -> int:
    """Runs the study; returns the exit status."""
    values = flags.FLAGS
    require(values.rounds >= 1, f"--rounds is {values.rounds}, but must be at least 1")
    require(0 < values.seconds < 600, f"--seconds is {values.seconds}, but must be greater than 0 and below 600")
    require(bool(values.points) and bool(values.ids), "--points and --ids must each name at least one")
    for law in values.ids:
        one_of("--ids", law, LAWS)
    for stack in values.stacks or ():
        one_of("--stacks", stack, tuple(STACKS))
    points = [parse(p, law) for p in dict.fromkeys(values.points) for law in dict.fromkeys(values.ids)]
    tiny = [parse("16x3x32", law, rows=3000) for law in LAWS]
    return study.run(
        measure=lambda: measure(points, values.stacks, values.rounds, values.seconds),
        smoke=lambda: measure(tiny, values.stacks, 2, 0.02),
        render=render,
        figures=figures,
    )


def measure(points: Sequence[Point], stacks: Sequence[str] | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Times the implementations at each point; returns the record."""
    absent = _absent(stacks or tuple(STACKS))
    used = [s for s in stacks or tuple(STACKS) if s not in absent]
    require(bool(used), f"--stacks is {','.join(stacks or ())}, but none of these can be used here")
    finished, rows, settings, differences = study.finished(), [], {}, {}
    for point in points:
        found = finished.get(point.name, lambda p=point: _measure(p, used, rounds, seconds))
        rows += found["rows"]
        settings[point.name], differences[point.name] = found["settings"], found["differences"]
    return record_lib.make(
        STUDY, rows, points=[dataclasses.asdict(p) | {"name": p.name} for p in points], stacks=used, absent=absent,
        rounds=rounds, seconds=seconds, settings=settings, differences=differences, agree=AGREE,
        compared_steps=COMPARED_STEPS, omp_wait_policy=WAIT_POLICY, peer_versions=installed.versions(),
    )  # fmt: skip


def _absent(stacks: Sequence[str]) -> dict[str, str]:
    """Returns why implementations cannot be used here."""
    from jaxrec.kernels.embedding_bag import library

    why_not = record_lib.without_paths(library.load())
    absent = {s: why_not for s in stacks if "compiled" in s and why_not}
    for stack, why in absent.items():
        print(f"{stack}: left out ({why})", flush=True)
    return absent | installed.left_out({s: installed.imports(fbgemm=s == "FBGEMM") for s in stacks if s in TORCH})


def _measure(point: Point, stacks: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Returns rows, settings and the differences of the compared rows, of a point."""
    rows: list[dict[str, Any]] = []

    def row(name: str, stack: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        rows.append(record_lib.row(name, stack, point.name, metric, unit, samples))

    with contextlib.ExitStack() as entered:
        folder = Path(entered.enter_context(tempfile.TemporaryDirectory()))
        workers = {s: entered.enter_context(_worker(s, point, folder / f"{k}.npz")) for k, s in enumerate(stacks)}
        differences = _compare(point, {s: folder / f"{k}.npz" for k, s in enumerate(stacks)}, workers)
        settings = {s: _tuned(one) for s, one in workers.items()}
        steps = {
            s: max(2, round(seconds * 1e3 / max(one.ask("run", steps=2)["ms"], 1e-3))) for s, one in workers.items()
        }
        step: dict[str, list[float]] = {s: [] for s in stacks}
        forward: dict[str, list[float]] = {s: [] for s in stacks}
        checked: dict[str, list[float]] = {s: [] for s in stacks if s in WITH_CHECKS}
        for turn in range(rounds):
            for s in forth_and_back(list(stacks), turn):
                one = workers[s]
                one.ask("use", setting=settings[s])
                step[s].append(one.ask("run", steps=steps[s])["ms"])
                forward[s].append(one.ask("forward", steps=steps[s])["ms"])
                if s in checked:
                    one.ask("use", setting={"checks": True})
                    checked[s].append(one.ask("run", steps=steps[s])["ms"])
        for s in stacks:
            row("lookup and update", s, "step", "ms", step[s])
            row("lookup", s, "forward", "ms", forward[s])
            if s in checked:
                row("lookup, check and update", s, "checked_step", "ms", checked[s])
        jax_stack = next((s for s in stacks if s not in TORCH), None)
        if jax_stack is not None:
            ceilings = workers[jax_stack].ask("ceilings")
            row("ceiling", "jaxrec", "random", "B/s", ceilings["random"])
            row("ceiling", "jaxrec", "copy", "B/s", ceilings["copy"])
            row("distinct rows of a batch", "jaxrec", "rows", "1", workers[jax_stack].ask("distinct")["rows"])
    print(f"{point.name}: " + ", ".join(f"{s} {median(step[s]):.2f}" for s in stacks) + " ms", flush=True)
    return {"rows": rows, "settings": settings, "differences": differences}


def _worker(stack: str, point: Point, file: Path) -> contextlib.AbstractContextManager[Worker]:
    argument = {"stack": stack, "point": dataclasses.asdict(point), "file": str(file)}
    environment = {"OMP_WAIT_POLICY": WAIT_POLICY, "JAX_PLATFORMS": "cpu"}
    return worker(stack, "experiments.embedding_update.worker", argument, environment)


def _compare(point: Point, files: dict[str, Path], workers: dict[str, Worker]) -> dict[str, float]:
    """Takes a few steps with each, and returns how far its rows are from those of the first of its optimizer.

    Raises:
      UserError: Too far.
    """
    found: dict[str, dict[str, np.ndarray]] = {}
    for stack, one in workers.items():
        one.ask("rows")
        before = dict(np.load(files[stack]))
        one.ask("run", steps=COMPARED_STEPS)
        one.ask("rows")
        found[stack] = {name: array - before[name] for name, array in np.load(files[stack]).items()}
    differences = {}
    for stack, arrays in found.items():
        first = found[next(s for s in found if STACKS[s] == STACKS[stack])]
        worst = max(float(np.abs(arrays[n] - first[n]).max() / max(np.abs(first[n]).max(), 1e-30)) for n in first)
        if not worst <= AGREE:
            raise UserError(
                f"{point.name}: after {COMPARED_STEPS} steps rows of {stack} differ by {worst:.2g} of the largest "
                f"change, beyond {AGREE}: nothing is timed"
            )
        differences[stack] = worst
    return differences


def _tuned(one: Worker) -> dict[str, Any]:
    """Returns the fastest setting; of jaxrec's the one without checks, as the others have none."""
    settings = one.ask("settings")["settings"]
    if len(settings) == 1 or "checks" in settings[0]:
        return settings[0]
    times = []
    for setting in settings:
        one.ask("use", setting=setting)
        one.ask("run", steps=2)
        times.append(min(one.ask("run", steps=4)["ms"] for _ in range(TUNING_SAMPLES)))
    return settings[times.index(min(times))]


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
