"""The same DLRM-DCNv2 in JAX and in PyTorch, on the same hardware: which is faster, by how much, and where?

    python -m experiments.jax_vs_pytorch.run --mode=all

A gate first: both compute the same, or nothing is timed. Then each stack is a process of its own, each first finds its
fastest setting, and they take turns. Optimizers are paired: element-wise Adagrad in jaxrec, PyTorch eager and compiled;
row-wise Adagrad in jaxrec and FBGEMM. There is no ratio across the two.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from absl import flags

from experiments import study
from experiments.baselines import installed
from experiments.baselines.stacks import OPTIMIZERS
from experiments.jax_vs_pytorch.report import figures, render
from experiments.jax_vs_pytorch.sides import RESIDENT_BATCHES, THREADS, Case
from experiments.movielens_packages import missing_for_movielens
from experiments.workers import Worker, forth_and_back, worker
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import UserError, one_of, require
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
TUNING_SAMPLES = 3
TRACE = "trace.json.gz"
WAIT_POLICY = os.environ.get("OMP_WAIT_POLICY", "passive")


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
      rounds: Turns of each stack.
      seconds: Of a turn, about, resident and fed each.
      device: As torch names it.
      stacks: Which baselines.
    """

    rounds: int
    seconds: float
    device: str
    stacks: tuple[str, ...]

    def __post_init__(self):
        require(self.rounds >= 1, f"--rounds is {self.rounds}, but must be at least 1")
        one_of("--device", self.device, ("cpu", "cuda"))
        require(bool(self.stacks), f"--stacks is empty, but must name some of: {'; '.join(OPTIMIZERS)}")
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
    options = Options(values.rounds, values.seconds, values.device, tuple(dict.fromkeys(values.stacks)))
    sizes = list(dict.fromkeys(values.sizes))
    require(bool(sizes), f"--sizes is empty, but must name some of: {', '.join(SIZES)}")
    for size in sizes:
        require(size in SIZES, f"--sizes has {size!r}, but must name some of: {', '.join(SIZES)}")
    return study.run(
        measure=lambda: measure(sizes, options),
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
    stacks, absent = _installed(options.stacks, options.device)
    quick = changes is not None
    require(
        bool(stacks) or quick,
        f"--stacks is {','.join(options.stacks)}, but none can be used here; `make baseline` installs torch and FBGEMM",
    )
    finished, rows, gates, regions, settings, traced = study.finished(), [], {}, {}, {}, False
    optimizers = list(dict.fromkeys([OPTIMIZERS[s] for s in stacks] or ["adagrad"]))
    with tempfile.TemporaryDirectory() as traces:
        for size in sizes:
            for optimizer in optimizers:
                peers = [s for s in stacks if OPTIMIZERS[s] == optimizer]
                used: dict[str, Any] = {}
                for law in LAWS.get(size, ("zipf", "uniform"))[: 1 if quick else None]:
                    of_law = _changes(size, law, changes)
                    company = Company(
                        f"{size}, {law}, {optimizer}",
                        [Case(s, size, optimizer, of_law, options.device) for s in ("jax", *peers)],
                        used, starts=size == sizes[0] and not quick, gated=not quick,
                    )  # fmt: skip
                    found = finished.get(company.name, lambda c=company: c.measure(options, Path(traces)))
                    rows += found["rows"]
                    gates |= found["gates"]
                    regions |= {f"{company.name}, {stack}": r for stack, r in found["regions"].items()}
                    settings |= {f"{company.name}, {stack}": s for stack, s in found["settings"].items()}
                    used = {stack: s["used"] for stack, s in found["settings"].items()}
                    traced |= found["traced"]
        quality = finished.get("quality", lambda: _quality(stacks, options, quick))
        rows += quality["rows"] + finished.get("imports", lambda: _imports(stacks))
    if not traced:
        (Path(flags.FLAGS.out) / TRACE).unlink(missing_ok=True)
    return record_lib.make(
        STUDY, rows, rounds=options.rounds, seconds=options.seconds, device=options.device, stacks=["jax", *stacks],
        absent=absent, gates=gates, regions=regions, settings=settings, quality=quality["facts"],
        sizes={size: _shape(size, changes) for size in sizes}, threads=THREADS, resident_batches=RESIDENT_BATCHES,
        peer_versions=installed.versions(), omp_wait_policy=WAIT_POLICY, trace=traced,
    )  # fmt: skip


def _installed(stacks: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Returns the stacks that can be used, and why others cannot: each's packages are imported in a process."""
    gpu = "; assert torch.cuda.is_available(), 'PyTorch sees no GPU'" if device == "cuda" else ""
    absent = installed.left_out({s: _imports_of(s) + gpu for s in stacks})
    return [s for s in stacks if s not in absent], absent


def _imports_of(stack: str) -> str:
    """Returns the program that imports what a stack needs."""
    return installed.imports(fbgemm=stack == "pytorch-fbgemm")


def _changes(size: str, law: str, changes: dict[str, Any] | None) -> dict[str, Any]:
    batch = (changes or {}).get("training.batch_size", catalogue.get(size).training.batch_size)
    return {"data.train_rows": BATCHES * batch, "data.ids": law, **(changes or {})}


def _shape(size: str, changes: dict[str, Any] | None) -> dict[str, Any]:
    config = Case("jax", size, "adagrad", _changes(size, "zipf", changes)).settled()
    tables = config.data.data  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "batch": config.training.batch_size, "tables": tables.tables, "rows": tables.table_rows[0],
        "bag": tables.bag, "dim": config.embedding.dim,
    }  # fmt: skip


def _gate(case: Case, setting: dict[str, Any]) -> dict[str, Any]:
    """Returns the verdict on a stack with the ids and the layout that it is timed with."""
    argument = {"config": case.config, "stack": case.stack, "device": case.device, **setting}
    module, environment = "experiments.jax_vs_pytorch.gate", _environment(case)
    with worker(f"the gate of {case.stack}", module, argument, environment) as process:
        return process.started


def _environment(case: Case, caches: Path | None = None) -> dict[str, str]:
    """Returns the variables of a process that is no other's: where it computes, how OpenMP waits, its caches."""
    on_gpu = case.device == "cuda"
    # A PyTorch process makes its first weights by JAX on the CPU, and leaves the GPU to PyTorch.
    platforms = {"JAX_PLATFORMS": "cuda" if on_gpu and case.stack == "jax" else "cpu"}
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(caches / case.stack)} if caches is not None else {}
    return {"OMP_WAIT_POLICY": WAIT_POLICY, **platforms, **cache}


def _start(
    case: Case, caches: Path, *, given: bool = False, keep: bool = True
) -> contextlib.AbstractContextManager[Worker]:
    argument = {**dataclasses.asdict(case), "given": given, "keep": keep, "cache": str(caches / "jax")}
    return worker(case.stack, "experiments.jax_vs_pytorch.worker", argument, _environment(case, caches))


@dataclasses.dataclass
class Company:
    """The stacks of one size, law and optimizer, which are timed in turns.

    Attributes:
      name: In the record.
      cases: jaxrec's first.
      used: Stack -> the setting that was found the fastest under another law; empty: it is to be found.
      starts: Whether starts are timed, too.
      gated: Whether the gate comes before the timing.
    """

    name: str
    cases: Sequence[Case]
    used: dict[str, Any]
    starts: bool
    gated: bool
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def row(self, what: str, stack: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        self.rows.append(record_lib.row(what, stack, self.name, metric, unit, samples))

    def measure(self, options: Options, traces: Path) -> dict[str, Any]:
        """Returns rows, verdicts of the gate, regions, the settings that were used, and whether a trace was written."""
        settings, gates, regions, traced = {}, {}, {}, False
        first_law = not self.used
        with contextlib.ExitStack() as stack:
            caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            # Where starts are timed, one after the other: the first has nothing in its cache, and the system's memory.
            tried = {c.stack: self._first_start(c, caches, options) for c in self.cases if self.starts and first_law}
            workers = {c.stack: self._start(stack, c, caches) for c in self.cases}
            for name, one in workers.items():
                best = self.used.get(name) or _tune(one, options, tried.setdefault(name, []))
                one.ask("use", setting=best)
                settings[name] = {"used": best, "tried": tried.get(name, [])}
            if self.gated and first_law:
                for case in self.cases[1:]:
                    gates[f"{case.config}, {case.stack}"] = _gate(case, settings[case.stack]["used"])
            self._turns(list(workers.values()), options)
            if first_law:
                for name, one in workers.items():
                    folder = traces / self.name.replace(", ", "_") / name
                    folder.mkdir(parents=True)
                    found = one.ask("profile", folder=str(folder), steps=5)
                    regions[name] = {**found, "trace": str(folder / found["trace"])}
                traced = _merge(self.name, regions)
                for found in regions.values():
                    del found["trace"], found["places"]
        return {"rows": self.rows, "gates": gates, "regions": regions, "settings": settings, "traced": traced}

    def _first_start(self, case: Case, caches: Path, options: Options) -> list[dict[str, Any]]:
        """Times a start without a cache; returns what a step takes with the memory that the system gives and takes."""
        begin = time.perf_counter()
        with _start(case, caches, keep=False) as one:
            self._started(one, begin, "cold")
            setting = one.ask("settings")["settings"][0]
            return [_tried(one, {**setting, "memory": "not kept"}, options)]

    def _start(self, stack: contextlib.ExitStack, case: Case, caches: Path) -> Worker:
        begin = time.perf_counter()
        one = stack.enter_context(_start(case, caches))
        self._started(one, begin, "warm")
        self.row("peak memory", case.stack, "resident_size", "GiB", [one.ask("peak")["bytes"] / 2**30])
        return one

    def _started(self, one: Worker, begin: float, cache: str) -> None:
        compiling = one.ask("compile")["seconds"]
        one.ask("resident", steps=2)
        if self.starts and not self.used:
            seconds = time.perf_counter() - begin
            self.row(f"start, {cache} cache", one.name, "to_second_step", "s", [seconds])
            self.row(f"compile, {cache} cache", one.name, "compile", "s", [compiling])

    def _turns(self, workers: Sequence[Worker], options: Options) -> None:
        steps = {one.name: _steps(one, options.seconds) for one in workers}
        sampled: dict[str, dict[str, list[float]]] = {}
        for kind in ("resident", "fed"):
            sampled[kind] = {one.name: [] for one in workers}
            for turn in range(options.rounds + 1):
                for one in forth_and_back(workers, turn):
                    ms = one.ask(kind, steps=steps[one.name])["ms"]
                    if turn:  # The first turn warms up.
                        sampled[kind][one.name].append(ms)
        batch = self.cases[0].settled().training.batch_size
        for one in workers:
            fed = sampled["fed"][one.name]
            self.row("step", one.name, "step", "ms", sampled["resident"][one.name])
            self.row("end to end", one.name, "step", "ms", fed)
            self.row("end to end", one.name, "rate", "samples/s", [1e3 * batch / ms for ms in fed])
            self.row("to the device", one.name, "batch", "ms", [one.ask("put", batches=8)["ms"] for _ in range(3)])
        self.row("load average", "machine", "load", "1", [os.getloadavg()[0]])
        said = ", ".join(f"{one.name} {median(sampled['fed'][one.name]):.1f} ms a step" for one in workers)
        print(f"{self.name}: {said}; load {os.getloadavg()[0]:.1f}", flush=True)


def _steps(one: Worker, seconds: float) -> int:
    """Returns how many steps fill a turn, about."""
    return max(1, round(1e3 * seconds / one.ask("resident", steps=2)["ms"]))


def _tried(one: Worker, setting: dict[str, Any], options: Options) -> dict[str, Any]:
    """Returns a setting with what a step takes under it: TUNING_SAMPLES of half a turn, after one that warms up."""
    steps = max(1, _steps(one, options.seconds) // 2)
    return {**setting, "ms": [one.ask("resident", steps=steps)["ms"] for _ in range(TUNING_SAMPLES)]}


def _tune(one: Worker, options: Options, tried: list[dict[str, Any]]) -> dict[str, Any]:
    """Adds what each setting takes to `tried`; returns the fastest."""
    found = []
    for setting in one.ask("settings")["settings"]:
        one.ask("use", setting=setting)
        tried.append(_tried(one, setting, options))
        found.append((median(tried[-1]["ms"]), setting))
    return min(found, key=lambda f: f[0])[1]


def _merge(name: str, regions: dict[str, Any]) -> bool:
    """Writes the trace of jaxrec and the compiled stack at the balanced size, on one time axis; returns whether."""
    stacks = ("jax", "pytorch-compiled")
    if not name.startswith("dlrm_balanced") or not set(stacks) <= set(regions) or flags.FLAGS.mode == "smoke":
        return False
    sides = [merged_trace.Side(s, Path(regions[s]["trace"]), regions[s]["places"]) for s in stacks]
    out = Path(flags.FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    merged_trace.write(merged_trace.merge(sides), out / TRACE)
    return True


def _quality(stacks: Sequence[str], options: Options, quick: bool) -> dict[str, Any]:
    """Trains the stacks of element-wise Adagrad on MovieLens from the same weights, evaluating as they go."""
    peers = [s for s in stacks if OPTIMIZERS[s] == "adagrad"]
    config, changes, reason = "dlrm_movielens", MOVIELENS, ""
    missing = missing_for_movielens(jaxrec_flags.cache_dir("data"))
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
        for one in workers:
            one.ask("compile")  # No clock is running yet.
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


def _imports(stacks: Sequence[str]) -> list[dict[str, Any]]:
    """Times the start of a process that imports a framework and does nothing else."""
    programs = {"jax": "import jaxrec.training.loop"}
    programs |= {s: _imports_of(s) for s in stacks}
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(4):
        for name, code in programs.items():
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
            if done.returncode:
                raise UserError(f"{name}: `{code}` has ended with status {done.returncode}")
            if turn:  # The first reads the files from the disk.
                samples[name].append(time.perf_counter() - begin)
    return [record_lib.row("import", name, "", "process", "s", s) for name, s in samples.items()]


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
