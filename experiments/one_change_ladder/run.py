"""From the first JAX program that one writes to jaxrec's: what does each change bring to a whole run?

    python -m experiments.one_change_ladder.run --mode=all

Every rung trains the same model from the same weights on the same batches, in a process of its own, its input included.
Rungs that are compared are alive at the same time and take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments import study
from experiments.one_change_ladder.report import figures, render
from experiments.one_change_ladder.rungs import Rung, beside, ladder, skipped
from experiments.workers import forth_and_back, worker
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import require
from jaxrec.configs import catalogue, overrides
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.pipeline import Batches
from jaxrec.profiling import hardware
from jaxrec.reporting import record as record_lib
from jaxrec.training.config import Config

STUDY = "one_change_ladder"
# More training rows than this are not drawn: the run then passes over them again.
MOST_ROWS = 2_000_000
HELD_OUT_ROWS = 65_536
EPS = 1e-3
TINY = {
    "data.tables": 3, "data.rows": 500, "model.bottom_mlp": (8, 4), "model.top_mlp": (8,), "embedding.dim": 4,
    "training.batch_size": 128,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
      rounds: Turns of each rung; the first is no sample.
      steps: Of a turn.
      alive: Rungs that are alive together at most.
    """

    rounds: int
    steps: int
    alive: int

    def __post_init__(self):
        for field, least in (("rounds", 2), ("steps", 1), ("alive", 2)):
            value = getattr(self, field)
            require(value >= least, f"--{field} is {value}, but must be at least {least}")


def define_flags() -> None:
    study.define_flags(STUDY)
    flags.DEFINE_integer("rounds", 10, "Turns of each rung; the first is no sample.")
    flags.DEFINE_integer("steps", 6, "Steps of a turn; on a GPU, where steps are short, 200.")
    flags.DEFINE_integer("alive", 4, "Rungs that are alive together at most; one of dense gradients needs 5 GB.")


def main() -> int:
    """Runs the study; returns the exit status."""
    # Several processes share a GPU: none may take most of its memory in advance.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    values = flags.FLAGS
    options = Options(values.rounds, values.steps, values.alive)
    # A sign test of fewer samples than 6 finds no change beyond chance.
    require(
        values.rounds >= 7, f"--rounds is {values.rounds}, but must be at least 7: one warms up, and 6 are compared"
    )
    return study.run(measure=lambda: measure(size(), options), smoke=smoke, render=render, figures=figures)


def smoke() -> dict[str, Any]:
    """Returns the record of a tiny model and two rungs."""
    config = overrides.replace_all(size(), TINY)
    platform = jax.default_backend()
    rungs = [rung for rung in ladder(platform) if rung.name in ("naive", "jaxrec")]
    return measure(config, Options(3, 2, 4), [rungs])


def size() -> Config:
    """Returns what is trained: the balanced size, with labels that can be learned.

    With the size's own eps of 1e-8 Adagrad's first steps are the signs of the gradients, rounding noise included: after
    40 steps a rounding of the first weights had moved the NE by 2e-3. With 1e-3 it was 5e-5, and the model learned.
    """
    config = catalogue.get("dlrm_balanced")
    changes = {
        "data.labels": "planted", "data.validation_rows": HELD_OUT_ROWS, "optimizer.eps": EPS,
        "embedding.optimizer.eps": EPS, "cpu_products": "default",  # Which library multiplies is a rung's matter.
    }  # fmt: skip
    return overrides.replace_all(config, changes)


def companies(platform: str, alive: int) -> list[list[Rung]]:
    """Returns the rungs that are measured together.

    Those of the ladder in order, the last of each company being the first of the next; then what is compared with the
    last rung, in company of it.
    """
    rungs = ladder(platform)
    others = beside(rungs[-1], platform)
    of_ladder = [rungs[i : i + alive] for i in range(0, len(rungs) - 1, alive - 1)]
    return of_ladder + [[rungs[-1], *others[i : i + alive - 1]] for i in range(0, len(others), alive - 1)]


def measure(config: Config, options: Options, together: Sequence[Sequence[Rung]] = ()) -> dict[str, Any]:
    """Trains all rungs; returns the record.

    Args:
      config: What is trained.
      options: How much is measured.
      together: The rungs of each company; empty: all of this platform's.
    """
    platform, batch = jax.default_backend(), config.training.batch_size
    steps = options.rounds * options.steps
    config = overrides.replace(config, "data.train_rows", min(MOST_ROWS, steps * batch))
    together, tables = together or companies(platform, options.alive), config.data
    assert isinstance(tables, SyntheticData)
    rows, finished = [], study.finished()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        best_ne, distinct = _draw(config, file)
        for k, rungs in enumerate(together):
            names = ", ".join(rung.name for rung in rungs)
            rows += finished.get(names, lambda k=k, rungs=rungs: _in_turns(rungs, platform, file, str(k), options))
    array_bytes = 4 * sum(tables.table_rows) * config.embedding.dim
    ceilings = hardware.measure(
        config.policy, 4 * config.embedding.dim, array_bytes, samples=3, size=min(array_bytes, hardware.BYTES)
    )
    rows.append(record_lib.row("copy", "jax", "", "rate", "GB/s", [s / 1e9 for s in ceilings.samples["copy"]]))
    return record_lib.make(
        STUDY,
        rows,
        rounds=options.rounds,
        steps_a_round=options.steps,
        batch_size=batch,
        tables={"count": tables.tables, "rows": tables.table_rows[0], "dim": config.embedding.dim},
        distinct_rows=distinct,
        held_out_rows=tables.validation_rows,
        best_ne=best_ne,
        eps=EPS,
        rungs=len(ladder(platform)) if len(together) > 1 else len(together[0]),
        companies=[[dataclasses.asdict(r) | {"program": r.program.__name__} for r in rungs] for rungs in together],
        skipped=skipped(platform),
    )


def _in_turns(rungs: Sequence[Rung], platform: str, file: Path, case: str, options: Options) -> list[dict[str, Any]]:
    """Trains the rungs of a company in turns; returns their rows of the record."""
    module = "experiments.one_change_ladder.worker"
    with contextlib.ExitStack() as stack:
        workers = []
        for rung in rungs:
            argument = {"platform": platform, "rung": rung.name, "file": str(file)}
            one = stack.enter_context(worker(f"rung {rung.name!r} (--alive={options.alive})", module, argument))
            print(f"{rung.name}: compiled in {one.started['compile_seconds']:.1f} s", flush=True)
            workers.append((rung, one, []))
        for turn in range(options.rounds):
            for _, one, told in forth_and_back(workers, turn):
                told.append(one.ask("train", steps=options.steps))
        return [
            row
            for rung, one, told in workers
            for row in _rows(rung, case, options.steps, one.started, told, one.ask("evaluate")["ne"])
        ]


def _draw(config: Config, file: Path) -> tuple[float, int]:
    """Writes the config and its rows into a file.

    Returns:
      The best NE that the held-out rows allow, and how many rows of tables the first batch names.
    """
    dataset = config.data.open("")
    columns = {}
    for split in ("train", "validation"):
        blocks = [dataset.splits[split][k] for k in range(len(dataset.splits[split]))]
        columns[split] = {c: np.concatenate([b[c] for b in blocks]) for c in blocks[0]}
    file.write_bytes(pickle.dumps((config, dataset.schema, columns)))
    best_ne = dataset.best_ne("validation") if dataset.best_ne else None
    assert best_ne is not None
    ids = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)[0].batch.ids
    return best_ne, sum(len(np.unique(ids[:, k])) for k in range(ids.shape[1]))


def _rows(
    rung: Rung, case: str, steps: int, started: dict[str, Any], turns: Sequence[dict[str, Any]], ne: float
) -> list[dict[str, Any]]:
    """Returns a rung's rows of the record, of what its process told."""

    def row(metric: str, unit: str, samples: Sequence[float]) -> dict[str, Any]:
        return record_lib.row(rung.name, "jax", case, metric, unit, samples)

    timed = turns[1:]
    rows = [row(m, "ms", [1e3 * turn[m] / steps for turn in timed]) for m in ("step", "user", "system")]
    rows += [
        row("run", "s", [sum(turn["step"] for turn in turns)]),
        row("compile", "s", [started["compile_seconds"]]),
        row("memory", "GB", [started["step_bytes"] / 1e9]),
        row("loss", "nats", [loss for turn in turns for loss in turn["losses"]]),
        row("ne", "1", [ne]),
    ]
    print(f"{rung.name}: {rows[0]['median']:.1f} ms a step, NE {ne:.5f}", flush=True)
    return rows


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
