"""What does each number type cost in quality, and what does it save in memory and time?

    python -m experiments.precision.run --mode=all

Every precision trains the same model with the same seeds, in turn; what is compared is the difference to float32 of the
same seed. Where the packages of MovieLens are not installed, planted synthetic rows take its place, and the record
says which packages those are.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from experiments import study
from experiments.finished import Finished
from experiments.movielens_packages import missing_for_movielens
from experiments.precision.interval import student
from experiments.precision.report import BALANCED, BASELINE, MOVIELENS, SYNTHETIC, figures, products_of, render
from jaxrec import flags as jaxrec_flags
from jaxrec.configs import catalogue, overrides
from jaxrec.reporting import record as record_lib
from jaxrec.startup import keep_freed_memory
from jaxrec.training.config import Config

STUDY = "precision"
PRECISIONS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "bfloat16 tables": {"embedding.dtype": "bfloat16"},
    "float16 tables": {"embedding.dtype": "float16"},
    "bfloat16 and bfloat16 tables": {"precision": "bfloat16", "embedding.dtype": "bfloat16"},
}
# Only GPUs have it.
TF32 = {"TF32 products": {"matmul": "tf32"}}
# Shorter than the config's own run: what is compared is precisions, and the whole must end within minutes.
SHORT_SYNTHETIC = {"training.steps": 1000, "training.eval_every": 200, "schedule.decay_steps": 1000}
# What a CPU or its system calls instructions that multiply 16-bit floats: x86's, and Arm's.
NARROW_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "bf16", "svebf16", "fphp", "asimdhp")
# Of what a run tells.
UNITS = {
    "test_auc": "1", "test_ne": "1", "best possible test_ne": "1", "best step": "1", "skipped steps": "1",
    "checkpoint": "bytes", "arguments": "bytes", "temporaries": "bytes", "seconds of the loop": "s",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
      seeds: Runs of each precision.
      movielens: Whether MovieLens is trained on, where its packages are; else planted synthetic rows.
      precisions: Which, by name; all where empty.
      quality: Changes of the config that is trained.
      repeats: Alternations of each precision with float32 in the timing.
      steps: Steps of a sample: of the config that is trained, and of the larger one.
      balanced: Changes of the larger config.
      samples: Of the rates of matrix products.
    """

    seeds: int
    movielens: bool = True
    precisions: tuple[str, ...] = ()
    quality: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    repeats: int = 7
    steps: tuple[int, int] = (100, 5)
    balanced: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    samples: int = 5


SMALL = {
    "data.tables": 2, "data.rows": 1000, "data.bag": 1, "data.train_rows": 20_000, "data.validation_rows": 2048,
    "data.test_rows": 2048, "training.batch_size": 256, "model.bottom_mlp": (16,), "model.top_mlp": (8,),
    "optimizer.name": "sgd",
}  # fmt: skip
SMOKE = Size(
    seeds=2,
    movielens=False,
    precisions=(BASELINE, "bfloat16 and bfloat16 tables"),
    quality={**SMALL, "training.steps": 20, "training.eval_every": 10},
    repeats=2,
    steps=(3, 2),
    balanced={**SMALL, "model.cross_layers": 1},
    samples=1,
)


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_integer("seeds", 5, "Runs of each precision, at least 2.")
    flags.DEFINE_string("data_dir", jaxrec_flags.cache_dir("data"), "Where prepared data sets are.")


def main() -> int:
    """Runs the study; returns the exit status."""
    keep_freed_memory()  # As `jaxrec.train` does.
    values = flags.FLAGS
    return study.run(
        measure=lambda: measure(values.data_dir, Size(values.seeds), study.finished()),
        smoke=lambda: measure(values.data_dir, SMOKE, study.finished()),
        render=render,
        figures=figures,
    )


def measure(data_dir: str, size: Size, finished: Finished) -> dict[str, Any]:
    """Trains, times and weighs every precision; returns the record."""
    student([0.0] * size.seeds)  # Refuses one seed before anything is trained.
    missing = missing_for_movielens(data_dir) if size.movielens else []
    if missing:
        print(f"MovieLens needs {', '.join(missing)}, not installed here: {SYNTHETIC} is trained instead")
    if size.movielens and not missing:
        config = overrides.replace_all(catalogue.get(MOVIELENS), size.quality)
    else:
        config = overrides.replace_all(catalogue.get(SYNTHETIC), {**SHORT_SYNTHETIC, **size.quality})
    balanced = overrides.replace_all(catalogue.get(BALANCED), size.balanced)
    chosen = precisions(size)
    rows = _quality(config, chosen, data_dir, size.seeds, finished)
    for timed, steps in ((config, size.steps[0]), (balanced, size.steps[1])):
        rows += _times(timed, chosen, data_dir, steps, size.repeats)
    rows += _product_rates(config, chosen, size.samples)
    return record_lib.make(
        STUDY,
        rows,
        config=config.as_dict(),
        timed={c.name: {"batch_size": c.training.batch_size, "steps": n}
               for c, n in ((config, size.steps[0]), (balanced, size.steps[1]))},
        precisions={name: {"compute": c.precision, "tables": c.embedding.dtype, "matmul": c.matmul}
                    for name, c in ((name, overrides.replace_all(config, own)) for name, own in chosen.items())},
        seeds=size.seeds,
        repeats=size.repeats,
        missing_packages=missing,
        cpu_instructions=narrow_instructions(Path("/proc/cpuinfo")),
    )  # fmt: skip


def precisions(size: Size) -> dict[str, dict[str, Any]]:
    """Returns name -> changes of the config; the first is what the others are compared with."""
    import jax

    found = PRECISIONS | (TF32 if jax.default_backend() == "gpu" else {})
    return {name: own for name, own in found.items() if not size.precisions or name in size.precisions}


def narrow_instructions(cpuinfo: Path) -> list[str] | None:
    """Returns which of `NARROW_INSTRUCTIONS` the system lists for this CPU; None where it lists nothing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [i for i in NARROW_INSTRUCTIONS if i in values.split()]
    return None


def _quality(
    config: Config, chosen: Mapping[str, Any], data_dir: str, seeds: int, finished: Finished
) -> list[dict[str, Any]]:
    """Trains every precision with every seed; returns the metrics at the best validation step, and what they cost."""
    samples: dict[tuple[str, str], list[float]] = {}
    for seed in range(seeds):
        for name, own in chosen.items():
            seeded = overrides.replace_all(config, {**own, "training.seed": seed})
            found = finished.get(f"{name}, seed {seed}", lambda seeded=seeded: _run(seeded, data_dir))
            print(f"{name}, seed {seed}: test AUC {found['test_auc']:.4f}, NE {found['test_ne']:.4f}", flush=True)
            for metric, value in found.items():
                samples.setdefault((name, metric), []).append(value)
    rows = [record_lib.row(n, "jax", config.name, m, UNITS[m], values) for (n, m), values in samples.items()]
    for metric in ("test_auc", "test_ne"):
        for name in chosen:
            if name == BASELINE:
                continue
            differences = [a - b for a, b in zip(samples[name, metric], samples[BASELINE, metric], strict=True)]
            low, high = student(differences)
            for what, values in (("", differences), (" low", [low]), (" high", [high])):
                rows.append(record_lib.row(name, "jax", config.name, f"{metric} - float32's{what}", "1", values))
    return rows


def _run(config: Config, data_dir: str) -> dict[str, float]:
    """Trains once; returns its figures, in `UNITS`."""
    from jaxrec.training.loop import Options, train
    from jaxrec.training.workdir import FOLDER

    workdir = tempfile.mkdtemp(prefix="jaxrec_precision_")
    try:
        summary, status = train(config, Options(workdir, data_dir, quiet=True))
        if status:
            raise SystemExit(status)
        best = Path(workdir) / FOLDER / str(summary["best_step"])
        checkpoint = sum(p.stat().st_size for p in best.rglob("*") if p.is_file())
    finally:
        shutil.rmtree(workdir)
    test, memory = summary["metrics"]["test"], summary["step_memory_bytes"]
    found = {
        "test_auc": test["auc"],
        "test_ne": test["ne"],
        "best step": summary["best_step"],
        "skipped steps": summary["skipped_steps"],
        "checkpoint": checkpoint,
        "seconds of the loop": summary["seconds"],
        "arguments": memory["argument"],
        "temporaries": memory["temp"],
    }
    if "best_ne" in test:
        found["best possible test_ne"] = test["best_ne"]
    return {metric: float(value) for metric, value in found.items()}


def _times(config: Config, chosen: Mapping[str, Any], data_dir: str, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Times a step of each precision in turn with float32's, on resident batches; returns times, memory and work."""
    from jaxrec.profiling.step_profile import Stepper

    def row(name: str, metric: str, unit: str, samples: list[float]) -> dict[str, Any]:
        return record_lib.row(name, "jax", config.name, metric, unit, samples)

    dataset = config.data.open(data_dir)
    baseline = Stepper(config, dataset)
    rows, of_baseline, held = [], [], {BASELINE: _held(baseline)}
    for name, own in chosen.items():
        if name == BASELINE:
            continue
        pairs, held[name] = _pairs(baseline, overrides.replace_all(config, own), dataset, steps, repeats)
        ratios = [b / a for a, b in pairs]
        print(f"{config.name}, {name}: {np.median(ratios):.2f} times float32's step", flush=True)
        of_baseline += [a for a, _ in pairs]
        rows += [row(name, "step", "ms", [b for _, b in pairs]), row(name, "step / float32's", "1", ratios)]
    rows.append(row(BASELINE, "step", "ms", of_baseline))
    rows += [row(name, metric, "bytes", [size]) for name, of_name in held.items() for metric, size in of_name.items()]
    flops = baseline.model_flops()
    return [*rows, row("matrix products", "work of a step", "FLOP", [flops])]


def _pairs(
    baseline: Any, config: Config, dataset: Any, steps: int, repeats: int
) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """Returns pairs of the ms of a step, float32's and this config's, and the bytes that this config's step holds.

    The config's state is gone afterwards: of the larger model each takes more than a gigabyte.
    """
    from jaxrec.profiling.step_profile import Stepper

    other, pairs = Stepper(config, dataset), []
    for repeat in range(repeats + 1):
        # Nobody always goes first.
        order = (baseline, other) if repeat % 2 else (other, baseline)
        ms = {id(stepper): stepper.resident(steps) for stepper in order}
        if repeat:  # The first round warms up.
            pairs.append((ms[id(baseline)], ms[id(other)]))
    return pairs, _held(other)


def _held(stepper: Any) -> dict[str, int]:
    """Returns the bytes of the tables and of the compiled step."""
    tables, memory = stepper.state.tables.values(), stepper.compiled.memory_analysis()
    return {
        "table weights": sum(t.weights.nbytes for t in tables),
        "table optimizer rows": sum(slot.nbytes for t in tables for slot in t.slots.values()),
        "compiled arguments": memory.argument_size_in_bytes,
        "compiled temporaries": memory.temp_size_in_bytes,
    }


def _product_rates(config: Config, chosen: Mapping[str, Any], samples: int) -> list[dict[str, Any]]:
    """Measures the rate of square matrix products in each type that products are computed in."""
    from jaxrec.profiling import hardware

    rates: dict[str, list[float]] = {}
    for own in chosen.values():
        changed = overrides.replace_all(config, own)
        kind = products_of(changed.precision, changed.matmul)
        if kind not in rates:
            # The other ceilings are not asked for here: they are measured on little memory.
            found = hardware.measure(changed.policy, 64, 1 << 20, samples=samples, size=1 << 20)
            rates[kind] = found.samples["products"]
    return [record_lib.row(kind, "jax", "", "matrix products", "FLOP/s", values) for kind, values in rates.items()]


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
