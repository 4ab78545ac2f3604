"""The time of each region of a step, forward and backward: a trace joined with the compiled program's metadata.

A region is a `jax.named_scope` of the step or of the model. An event of a trace names an instruction of the program;
its `op_name` in the program's text is the path of scopes that it came from. These rules say whose time it is, in turn:

1. The instruction's own `op_name`. A fusion has its root's: it belongs to the region of what it computes last, however
   much of another region it takes along. Fusions whose parts name several regions *span* them; their share is stated.
2. Where that names no region, as in fusions that a rewrite made: most of the parts of the fusion, by bytes of result.
3. Where there is none inside either (XLA's rewrites of reductions and of small products drop it): the region of the
   largest operand that has one, else of the first user that has one. This is inferred, and its share is stated.

What is left is listed by name. `transpose(` in the path marks the backward pass; what has none (updates, sums) is
counted as forward.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping

import numpy as np

from jaxrec.profiling.hlo import COLLECTIVES, FREE, Instruction, Module
from jaxrec.profiling.op_events import OpTimes, Run

# Every region of a step, in its order; JAX's and PyTorch's profiles share the list.
REGIONS = (
    "embedding_lookup", "bottom_mlp", "interaction", "top_mlp", "loss", "gradient_sum", "clip", "dense_update",
    "embedding_update", "finite_check",
)  # fmt: skip
OTHER = "other"

_COMPONENT = re.compile(r"[/()]")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an instruction belongs.

    Attributes:
      region: One of `REGIONS`, or `OTHER`.
      backward: Whether it is of the backward pass.
      inferred: Whether a neighbour's region is taken for its own.
      spans: The regions that its parts name, in the order of `REGIONS`.
      foreign: Of the elements that its parts compute, again where a broadcast needs them again (see
        `Module.evaluations`), the share of those that name another region.
    """

    region: str
    backward: bool
    inferred: bool = False
    spans: tuple[str, ...] = ()
    foreign: float = 0.0

    def __str__(self) -> str:
        words = [self.region, "backward" if self.backward else "forward", *(["inferred"] if self.inferred else [])]
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class RegionTime:
    """The thread time of a region on one device, in milliseconds a step, one number for each traced step."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]

    @property
    def samples(self) -> tuple[float, ...]:
        """Of both passes."""
        return tuple(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def median(self) -> float:
        return float(np.median(self.samples))


@dataclasses.dataclass(frozen=True)
class Regions:
    """The regions of a trace.

    Attributes:
      devices: Device -> region -> time; all of `REGIONS` that the program has, then `OTHER`.
      op_ms: Operation -> its mean thread time a step and device.
      op_place: Operation -> its region, pass and whether that is a neighbour's: `top_mlp backward inferred`.
      other_ms: As `op_ms`, of the operations without a region, the longest first.
      inferred_share: Of the operations' time, that whose region is a neighbour's.
      spanning_share: Of the operations' time, that of fusions whose parts name several regions.
      foreign_share: Of the operations' time, an estimate of what is counted for the wrong region because fusions
        span: the time of such a fusion times the share of its elements that another region names.
      collective_share: Of the operations' time, that of collectives, waits for other devices included.
      unknown_ms: As `op_ms`, of events whose name the program does not have.
      total_ms: Mean thread time of all operations, a step and device.
      wall_ms: From the first operation of a step to the end of the last, of each device and step.
      busy_share: Of that time, the part in which at least one thread was at an operation.
      runtime_ms: Mean thread time a step in which the runtime chose the next operation or started it.
    """

    devices: Mapping[int, Mapping[str, RegionTime]]
    op_ms: Mapping[str, float]
    op_place: Mapping[str, str]
    other_ms: Mapping[str, float]
    inferred_share: float
    spanning_share: float
    foreign_share: float
    collective_share: float
    unknown_ms: Mapping[str, float]
    total_ms: float
    wall_ms: tuple[float, ...]
    busy_share: float
    runtime_ms: float

    @property
    def mapped_share(self) -> float:
        """Of the operations' time, that which has a region."""
        return 1 - sum(self.other_ms.values()) / self.total_ms if self.total_ms else 0.0

    def mean(self) -> dict[str, RegionTime]:
        """Returns the mean over the devices, which run the same program side by side."""
        per_device = list(self.devices.values())

        def average(region: str, backward: bool) -> tuple[float, ...]:
            rows = [d[region].backward if backward else d[region].forward for d in per_device]
            steps = min(len(r) for r in rows)
            return tuple(float(x) for x in np.mean([r[:steps] for r in rows], axis=0))

        return {name: RegionTime(average(name, False), average(name, True)) for name in per_device[0]}


def region_of(op_name: str, regions: Iterable[str] = REGIONS) -> tuple[str, bool] | None:
    """Returns (region, whether backward) of a path of scopes, or None where it names no region.

    The outermost region counts. XLA joins the paths of operations that it merged by `;`: the first that has one counts.
    """
    known = set(regions)
    for path in op_name.split(";"):
        for component in path.split("/"):
            # jvp(loss), transpose(jvp(loss)), checkpoint(...): transformations wrap the scope's name.
            for part in _COMPONENT.split(component):
                if part in known:
                    return part, "transpose(" in path
    return None


class Places:
    """The place of every instruction of a program."""

    def __init__(self, module: Module, regions: tuple[str, ...] = REGIONS):
        self._module, self._regions = module, regions

    def __getitem__(self, name: str) -> Place:
        return self._place(name)

    def present(self) -> tuple[str, ...]:
        """Returns the regions that the program has, in order."""
        found = {self[name].region for name, i in self._module.instructions.items() if i.opcode not in FREE}
        return tuple(r for r in self._regions if r in found)

    @functools.cached_property
    def _known(self) -> dict[str, Place]:
        return {}

    def _place(self, name: str) -> Place:
        if name not in self._known:
            i = self._module.instructions[name]
            elements = self._evaluations(i)
            own = self._own(i)
            if own is not None:
                total = sum(elements.values())
                foreign = 1 - elements.get(own[0], 0.0) / total if total else 0.0
                self._known[name] = Place(*own, spans=tuple(elements), foreign=foreign)
            else:
                found = self._neighbour(i)
                self._known[name] = Place(*(found or (OTHER, False)), inferred=found is not None)
        return self._known[name]

    def _own(self, i: Instruction) -> tuple[str, bool] | None:
        """By rules 1 and 2."""
        if i.opcode == "parameter":
            return None  # Its name is the argument's, in which a layer may be called like its region.
        if (found := region_of(i.op_name, self._regions)) is not None:
            return found
        weights: dict[tuple[str, bool], int] = {}
        if i.opcode == "fusion":
            for part in self._module.inside(i):
                if part.opcode not in FREE and (found := region_of(part.op_name, self._regions)) is not None:
                    weights[found] = weights.get(found, 0) + part.result_bytes
        return max(weights, key=weights.__getitem__) if weights else None

    def _evaluations(self, i: Instruction) -> dict[str, float]:
        """Returns, in the list's order, region -> elements that a fusion computes in parts that name it."""
        found: dict[str, float] = {}
        for part, count in self._module.evaluations(i).items() if i.opcode == "fusion" else ():
            if part.opcode not in FREE and (place := region_of(part.op_name, self._regions)) is not None:
                found[place[0]] = found.get(place[0], 0.0) + count
        return {region: found[region] for region in self._regions if region in found}

    def _neighbour(self, i: Instruction) -> tuple[str, bool] | None:
        """By rule 3, through chains of instructions without a name of their own."""
        for upstream in (True, False):
            level, seen = [i], {i.name}
            while level:
                reached = []
                for at in level:
                    operands, users = self._module.neighbours(at.name)
                    reached += [n for n in (operands if upstream else users) if n.name not in seen]
                named = [(n, own) for n in reached if (own := self._own(n)) is not None]
                if named:
                    _, (region, backward) = max(named, key=lambda x: x[0].result_bytes) if upstream else named[0]
                    # A product of a saved activation and a gradient is of the backward pass.
                    return region, backward or (upstream and any(b for _, (_, b) in named))
                seen |= {n.name for n in reached}
                level = [n for n in reached if n.opcode != "parameter"]
        return None


def join(module: Module, times: OpTimes, regions: tuple[str, ...] = REGIONS, *, skip: int = 0) -> Regions:
    """Joins a trace with its program.

    Args:
      module: The compiled program.
      times: Of the trace's operations, of this program alone.
      regions: The scopes that are told apart.
      skip: Runs of each device, the first, that are left out.

    Raises:
      ValueError: The trace holds no run of the program.
    """
    runs = _runs(times, skip)
    if not runs:
        raise ValueError(f"the trace holds no operations of {module.name}")
    places = Places(module, regions)
    names = (*places.present(), OTHER)
    count = sum(len(r) for r in runs.values())
    # A compiled kernel works on all threads of the pool, which devices of a process share; a trace shows the one that
    # called it, which works as long as the others.
    kernel_threads = max(1, (os.cpu_count() or 1) // len(runs))
    op_ms: dict[str, float] = {}
    devices: dict[int, dict[str, RegionTime]] = {}
    for device, of_device in runs.items():
        sums = {name: ([0.0] * len(of_device), [0.0] * len(of_device)) for name in names}
        for k, run in enumerate(of_device):
            for op, nanoseconds in times.time[run].items():
                is_kernel = op in module.instructions and bool(module.instructions[op].kernel)
                ms = nanoseconds / 1e6 * (kernel_threads if is_kernel else 1)
                op_ms[op] = op_ms.get(op, 0.0) + ms / count
                place = places[op] if op in module.instructions else Place(OTHER, False)
                sums[place.region][place.backward][k] += ms
        devices[device] = {name: RegionTime(tuple(f), tuple(b)) for name, (f, b) in sums.items()}
    total = sum(op_ms.values())

    def share(chosen: Iterable[str]) -> float:
        return sum(op_ms[op] for op in chosen) / total if total else 0.0

    def longest(chosen: Iterable[str]) -> dict[str, float]:
        return {op: op_ms[op] for op in sorted(chosen, key=lambda op: -op_ms[op])}

    known = [op for op in op_ms if op in module.instructions]
    unknown = [op for op in op_ms if op not in module.instructions]
    chosen_runs = [run for of_device in runs.values() for run in of_device]
    wall = [times.wall[run] for run in chosen_runs]
    return Regions(
        devices=devices,
        op_ms=op_ms,
        op_place={op: str(places[op]) for op in known},
        other_ms=longest([*unknown, *(op for op in known if places[op].region == OTHER)]),
        inferred_share=share(op for op in known if places[op].inferred),
        spanning_share=share(op for op in known if len(places[op].spans) > 1),
        foreign_share=sum(op_ms[op] * places[op].foreign for op in known) / total if total else 0.0,
        collective_share=share(op for op in known if is_collective(module.instructions[op])),
        unknown_ms=longest(unknown),
        total_ms=total,
        wall_ms=tuple(w / 1e6 for w in wall),
        busy_share=sum(times.busy[run] for run in chosen_runs) / sum(wall) if sum(wall) else 0.0,
        runtime_ms=times.runtime / 1e6 / len(times.time),
    )


def is_collective(i: Instruction) -> bool:
    """Whether an instruction moves data between devices, or waits for one that does."""
    return i.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES


def _runs(times: OpTimes, skip: int) -> dict[int, list[Run]]:
    """Device -> its runs in the order of the trace."""
    runs: dict[int, list[Run]] = {}
    for run in sorted(times.time, key=lambda run: times.begin[run]):
        runs.setdefault(run.device, []).append(run)
    return {device: of_device[skip:] for device, of_device in sorted(runs.items()) if of_device[skip:]}
