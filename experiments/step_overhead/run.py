"""How much time per step passes outside the compiled program?

    python -m experiments.step_overhead.run --mode=all

Two loops take the same steps in turn: the bare one calls the compiled step on batches that are on the device already;
the other is `jaxrec.training.loop`, with input, counters, progress and metrics. Their difference is what training adds
to the compiled program, thread contention with the input included. The rows are drawn beforehand, but for one case:
drawing synthetic rows is the data set's own work.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import numpy as np
from absl import flags

from experiments import study
from experiments.drawn import Drawn
from experiments.step_overhead.report import figures, render
from jaxrec import flags as jaxrec_flags
from jaxrec.configs import catalogue, overrides
from jaxrec.profiling.step_profile import Stepper
from jaxrec.reporting import record as record_lib
from jaxrec.training.loop import Options, train

STUDY = "step_overhead"
# A program that does next to nothing, where the loop's own time cannot hide, and one of the default's size.
CASES: dict[str, dict[str, Any]] = {
    "tiny": {"training.batch_size": 64, "model.bottom_mlp": (8, 16), "model.top_mlp": (8,)},
    "default": {},
    "default, rows drawn meanwhile": {},
}


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_integer("repeats", 7, "Alternations of the two loops per case.")
    flags.DEFINE_integer("steps", 600, "Steps of each loop.")


def main() -> int:
    """Runs the study; returns the exit status."""
    values = flags.FLAGS
    return study.run(
        measure=lambda: measure(values.repeats, values.steps),
        smoke=lambda: measure(2, 20),
        render=render,
        figures=figures,
    )


def measure(repeats: int, steps: int) -> dict[str, Any]:
    """Times both loops in alternation; returns the record."""
    rows, batch_sizes = [], {}
    for case, changes in CASES.items():
        config = catalogue.get("dlrm_synthetic")
        small = {"data.validation_rows": 2048, "data.test_rows": 2048, "data.train_rows": 200_000}
        cadence = {"training.steps": steps, "training.eval_every": 0, "training.checkpoint_every": 0}
        config = overrides.replace_all(config, {**small, **cadence, **changes})
        if "drawn" not in case:
            config = dataclasses.replace(config, data=Drawn(config.data))
        batch_sizes[case] = config.training.batch_size
        bare, loop = Stepper(config, config.data.open("")), []
        bare_ms = []
        for repeat in range(repeats + 1):
            a, b = bare.resident(steps), _loop_milliseconds(config)
            if repeat:  # The first pair warms up.
                bare_ms.append(a)
                loop.append(b)
        print(f"{case}: compiled program {np.median(bare_ms):.3f} ms, loop {np.median(loop):.3f} ms a step")
        rows.append(record_lib.row("compiled program alone", "jax", case, "step", "ms", bare_ms))
        rows.append(record_lib.row("training loop", "jax", case, "step", "ms", loop))
        difference = [b - a for a, b in zip(bare_ms, loop, strict=True)]
        rows.append(record_lib.row("outside the compiled program", "jax", case, "step", "ms", difference))
    return record_lib.make(STUDY, rows, steps=steps, batch_sizes=batch_sizes)


def _loop_milliseconds(config: Any) -> float:
    """Trains once; returns the time per step without evaluation and checkpoints."""
    with tempfile.TemporaryDirectory() as workdir:
        summary, _ = train(config, Options(workdir, "", quiet=True))
    share = summary["stage_shares"]["step"] + summary["stage_shares"]["input"]
    return summary["seconds"] * share / summary["steps_this_process"] * 1e3


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
