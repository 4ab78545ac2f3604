"""The rungs of the ladder, and what was tried beside its top: the program, the loop and the options of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.one_change_ladder import programs
from jaxrec.data.schema import Dataset
from jaxrec.training.config import Config


@dataclasses.dataclass(frozen=True)
class Rung:
    """A way to train.

    Attributes:
      name: Unique.
      change: What differs from the rung that it is compared with.
      program: Makes the step of a config and a data set.
      donated: Whether the state's memory is given to the next state.
      ahead: Whether the host dispatches steps ahead of the device and reads losses later; else it waits for each step.
      threads: Of the input, which then brings batches to the device ahead of the step; 0: a batch is made when the step
        needs it.
      keeps_memory: Whether freed memory is kept (`startup.keep_freed_memory`).
      products: As `Config.cpu_products`.
      config: Changes of the config, path -> value.
      same_arithmetic: Whether the same numbers are to come out, up to rounding.
      rounded: Not 0: the seed of a rounding error that is added to every first dense weight.
    """

    name: str
    change: str
    program: Callable[[Config, Dataset], programs.TrainingProgram] = programs.table_gradients
    donated: bool = False
    ahead: bool = False
    threads: int = 0
    keeps_memory: bool = False
    products: str = "default"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    same_arithmetic: bool = True
    rounded: int = 0


def _other(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a rung whose config makes another arithmetic."""
    return {"config": config, "same_arithmetic": False}


class Change(NamedTuple):
    """A change of a rung, which makes another one.

    Attributes:
      name: Of the rung that it makes.
      change: What it is, for readers.
      fields: Of `Rung`, by name.
      platform: JAX's name of the only devices that have it; empty: all do.
    """

    name: str
    change: str
    fields: Mapping[str, Any]
    platform: str = ""

    def of(self, rung: Rung) -> Rung:
        return dataclasses.replace(rung, **self.fields, name=self.name, change=self.change)


NAIVE = Rung("naive", "dense gradients of all tables; batch, step, loss, one after the other")

# Each is added to those before it.
CHANGES = (
    Change("donated", "the state's memory is given to the next state", {"donated": True}),
    Change("ahead", "the host runs two steps ahead; losses are read later", {"ahead": True}),
    Change("input threads", "two threads make batches, another brings them to the device", {"threads": 2}),
    Change(
        "touched rows",
        "gradients of looked-up vectors; only touched rows are updated",
        {"program": programs.touched_rows},
    ),
    Change("one array", "all tables in one array: one gather, one sort, one update", {"program": programs.one_array}),
    Change("memory kept", "freed memory stays with the process", {"keeps_memory": True}, "cpu"),
    Change("no sort", "duplicates are merged without a sort", {"program": programs.without_sort}),
    Change("jaxrec", "jaxrec's step: nothing is written before all is finite", {"program": programs.jaxrec_step}),
    Change("Eigen", "matrix products by Eigen instead of YNNPACK", {"products": "eigen"}, "cpu"),
)

# Each is a change of the ladder's last rung alone.
TRIED = (
    Change("not donated", "the state is copied", {"donated": False}),
    Change("not ahead", "the host waits for each step, and reads its loss", {"ahead": False}),
    Change("no input threads", "a batch is made when the step needs it", {"threads": 0}),
    Change("one input thread", "one thread makes batches", {"threads": 1}),
    Change("bfloat16", "the dense part computes in bfloat16", _other({"precision": "bfloat16"})),
    Change("bfloat16 tables", "tables of bfloat16, rounded stochastically", _other({"embedding.dtype": "bfloat16"})),
    Change(
        "row-wise", "row-wise Adagrad: one accumulator a row", _other({"embedding.optimizer.name": "rowwise_adagrad"})
    ),
    Change("TF32", "matrix products by TF32", _other({"matmul": "tf32"}), "gpu"),
)

# The last rung again, its first dense weights changed by a rounding: how far do times and NE move for no reason?
CONTROLS = tuple(
    Change(f"rounding {k}", "the same, from weights that a rounding has changed", {"rounded": k}) for k in (1, 2)
)


def ladder(platform: str) -> list[Rung]:
    """Returns the rungs that devices of `platform` have, each built on the one before."""
    rungs = [NAIVE]
    for change in _of(CHANGES, platform):
        rungs.append(change.of(rungs[-1]))
    return rungs


def beside(best: Rung, platform: str) -> list[Rung]:
    """Returns what is compared with the ladder's last rung."""
    return [change.of(best) for change in _of((*TRIED, *CONTROLS), platform)]


def skipped(platform: str) -> list[str]:
    """Returns the names of those that devices of `platform` lack."""
    return [c.name for c in (*CHANGES, *TRIED) if c.platform not in ("", platform)]


def by_name(name: str, platform: str) -> Rung:
    """Returns one of them."""
    rungs = ladder(platform)
    return next(rung for rung in (*rungs, *beside(rungs[-1], platform)) if rung.name == name)


def _of(changes: Sequence[Change], platform: str) -> list[Change]:
    return [c for c in changes if c.platform in ("", platform)]
