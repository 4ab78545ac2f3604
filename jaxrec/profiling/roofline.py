"""How far each region is from what the machine's ceilings allow, and which ceiling that is.

An operation needs at least max(product FLOPs / product rate, element-wise FLOPs / their rate, streamed bytes / copy
rate, random bytes / random rate): the four can overlap, so that a region's bound is the largest of its four sums.

Ceilings are of the whole device. Thread times are therefore scaled to wall time first, by the step's wall time over
the time of all threads: where an operation leaves cores idle, that is distance from its bound.

Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxrec.profiling.hardware import Ceilings
from jaxrec.profiling.hlo import Module, Work
from jaxrec.profiling.regions import OTHER, Places, Regions, is_collective

RESOURCES = ("products", "elementwise", "copy", "random")
ARITHMETIC = ("products", "elementwise")
# Operations that do so little are taken for the cost of starting one.
SMALL_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class RegionBound:
    """One region on one device.

    Attributes:
      work: Of a step.
      wall_ms: Its share of the step's wall time, by thread time.
      seconds_by_resource: What it needs of each of `RESOURCES`, in ms.
    """

    work: Work
    wall_ms: float
    needs_ms: dict[str, float]

    @property
    def limited_by(self) -> str:
        """The resource that it needs longest."""
        return max(self.needs_ms, key=self.needs_ms.__getitem__)

    @property
    def bound_ms(self) -> float:
        """The least that it can take."""
        return self.needs_ms[self.limited_by]

    @property
    def attained(self) -> float:
        """Bound over time: 1 is the ceiling; more means that caches served what was counted as memory."""
        return self.bound_ms / self.wall_ms if self.wall_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "work": self.work._asdict(), "wall_ms": self.wall_ms, "needs_ms": self.needs_ms,
            "limited_by": self.limited_by, "bound_ms": self.bound_ms, "attained": self.attained,
        }  # fmt: skip


def needs_ms(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """Returns what some work needs of each resource, in ms."""
    return {
        "products": 1e3 * work.product_flops / ceilings.products,
        "elementwise": 1e3 * work.other_flops / ceilings.elementwise,
        "copy": 1e3 * work.stream_bytes / ceilings.copy,
        "random": 1e3 * work.random_bytes / ceilings.random,
    }


def bounds(module: Module, regions: Regions, ceilings: Ceilings) -> dict[str, RegionBound]:
    """Returns the bound of every region that has work or time."""
    places = Places(module, tuple(name for name in regions.mean() if name != OTHER))
    work: dict[str, Work] = {name: Work() for name in regions.mean()}
    for name in module.instructions:
        region = places[name].region
        work[region] = work[region].plus(module.work(name), module.times(name))
    scale = wall_of_thread_time(regions)
    times = {name: scale * float(np.mean(time.samples)) for name, time in regions.mean().items()}
    return {name: RegionBound(work[name], times[name], needs_ms(work[name], ceilings)) for name in work}


def wall_of_thread_time(regions: Regions) -> float:
    """Returns the factor that turns thread time into a share of the time in which an operation was running."""
    wall = float(np.mean(regions.wall_ms)) * regions.busy_share
    return wall / regions.total_ms if regions.total_ms else 0.0


@dataclasses.dataclass(frozen=True)
class Split:
    """A step's wall time, in ms, by what it was spent on; the parts add up to it.

    Attributes:
      communication: Operations that move data between devices, or wait for it.
      overhead: No operation was running, or one that had only to be started.
      arithmetic: Operations that the product or the element-wise rate bounds.
      memory: Operations that copying or random reads bound.
      start_ms: The thread time that starting an operation takes.
    """

    communication: float
    overhead: float
    arithmetic: float
    memory: float
    start_ms: float


def split(module: Module, regions: Regions, ceilings: Ceilings) -> Split:
    """Sorts a step's operations by what bounds each.

    Every operation's time up to that of the trace's own smallest operations (the median of those that touch less than
    1 KiB) counts as overhead: starting it.
    """
    small = [
        ms / module.times(op)
        for op, ms in regions.op_ms.items()
        if op in module.instructions and module.instructions[op].opcode != "parameter"
        and module.work(op).bytes < SMALL_BYTES and not module.instructions[op].called[1:]
        and not is_collective(module.instructions[op])
    ]  # fmt: skip
    start = float(np.median(small)) if small else 0.0
    parts = {"communication": 0.0, "overhead": 0.0, "arithmetic": 0.0, "memory": 0.0}
    for op, ms in regions.op_ms.items():
        if op not in module.instructions:
            parts["overhead"] += ms
            continue
        if is_collective(module.instructions[op]):
            parts["communication"] += ms
            continue
        started = min(ms, start * module.times(op))
        needs = needs_ms(module.work(op), ceilings)
        bound = max(needs, key=needs.__getitem__)
        parts["overhead"] += started
        parts["arithmetic" if bound in ARITHMETIC else "memory"] += ms - started
    scale = wall_of_thread_time(regions)
    parts = {name: scale * ms for name, ms in parts.items()}
    parts["overhead"] += float(np.mean(regions.wall_ms)) * (1 - regions.busy_share)
    return Split(**parts, start_ms=start)
