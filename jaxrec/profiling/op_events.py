"""The time of a compiled program's operations, read from a trace of `jax.profiler`.

What a trace holds:

- On a CPU, one event for each operation and run, on the thread that started it, with the statistics `hlo_op`,
  `program_id`, `run_id` and `device_ordinal`. That event alone is not the operation's time: an operation that works on
  several threads hands tasks to a pool (`ThreadpoolListener::Record`, with an id), which run between
  `ThreadpoolListener::StartRegion` (with the id) and `StopRegion`, on other threads and often after the event's end.
  The tasks' time is therefore added to the operation that handed them over. A thread that completes an operation goes
  on to start others (`ThunkExecutor::Execute`), inside the same task: what is nested counts as itself alone.
- On a GPU, one event for each kernel on the line of its stream, with `hlo_op`; other lines of the device repeat them.
  Runs are told apart by how often an operation has occurred, so that a program with loops has more runs than steps.

All times are of threads (or streams): two threads that work on an operation for 1 ms each are 2 ms. A thread counts as
occupied while it waits inside an operation, or while the system runs another process in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

_EXECUTOR = "ThunkExecutor::Execute"
_HANDED_OVER, _TASK_BEGIN, _TASK_END = (
    f"ThreadpoolListener::{what}" for what in ("Record", "StartRegion", "StopRegion")
)


class Event(NamedTuple):
    """An event of a trace; times in nanoseconds."""

    name: str
    start: float
    duration: float
    stats: dict[str, Any]


class Line(NamedTuple):
    """The events of a thread, or of a stream of a device.

    Attributes:
      plane: `/host:CPU`, `/device:GPU:0`.
      events: In any order.
      name: Of the thread or stream.
    """

    plane: str
    events: Sequence[Event]
    name: str = ""


class Run(NamedTuple):
    """One execution of a program on one device.

    Attributes:
      program: The trace's number of the program; -1 where it gives none.
      run: The trace's number of the run; on GPUs, the ordinal of the operation's occurrence.
      device: Its ordinal.
    """

    program: int
    run: int
    device: int


@dataclasses.dataclass
class OpTimes:
    """Thread time of operations, in nanoseconds.

    Attributes:
      time: Run -> operation -> time.
      busy: Run -> wall time during which at least one thread was at one of its operations.
      begin: Run -> when its first operation began, on the trace's clock.
      wall: Run -> time from the beginning of its first operation to the end of its last.
      runtime: Time in which threads chose the next operation, or started it.
    """

    time: dict[Run, dict[str, float]]
    busy: dict[Run, float]
    begin: dict[Run, float]
    wall: dict[Run, float]
    runtime: float

    @property
    def total(self) -> float:
        """The time of all operations."""
        return sum(sum(ops.values()) for ops in self.time.values())


def read(path: str | Path) -> list[Line]:
    """Reads an `.xplane.pb`, or the newest one below a folder.

    Raises:
      FileNotFoundError: There is none.
    """
    path = Path(path)
    if path.is_dir():
        found = sorted(path.rglob("*.xplane.pb"), key=lambda p: p.stat().st_mtime)
        if not found:
            raise FileNotFoundError(f"no trace (*.xplane.pb) below {path}")
        path = found[-1]
    with warnings.catch_warnings():
        # jax 0.12 warns of a type of its own; where warnings are errors, that would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_lines(path))


def _lines(path: Path) -> Iterator[Line]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not (plane.name.startswith("/device:") or plane.name == "/host:CPU"):
            continue
        for line in plane.lines:
            events = []
            for e in line.events:
                name = e.name
                known = name == _EXECUTOR or name.startswith("ThreadpoolListener::")
                stats = {} if name.startswith("end: ") else dict(e.stats)  # Ends are many, and tell nothing more.
                if known or "hlo_op" in stats:
                    events.append(Event(name, e.start_ns, e.duration_ns, stats))
            yield Line(plane.name, events, line.name)


def op_times(lines: Iterable[Line], module: str | None = None) -> OpTimes:
    """Adds up the time of operations.

    Args:
      lines: From `read`.
      module: Counts operations of this HLO module alone (`jit_train_step`), where events name theirs.
    """
    lines = list(lines)
    devices = [line for line in lines if line.plane.startswith("/device:")]
    if any(e.stats.get("hlo_op") for line in devices for e in line.events):
        return _device_times(devices, module)
    return _thread_times(lines, module)


@dataclasses.dataclass(eq=False)
class _Interval:
    """Something that a thread does; `owner` is found at the end for tasks."""

    start: float
    end: float
    op: tuple[Run, str] | None = None
    task: int | None = None  # The id under which it was handed over.
    nested: float = 0.0


def _thread_times(lines: list[Line], module: str | None) -> OpTimes:
    intervals: list[_Interval] = []
    pieces: list[tuple[_Interval, float, float]] = []
    handed_over_by: dict[int, _Interval | None] = {}
    for line in lines:
        own = _intervals(line, module)
        intervals += own
        points = [(e.start, e.stats["_p"]) for e in line.events if e.name == _HANDED_OVER and "_p" in e.stats]
        pieces += _sweep(own, sorted(points), handed_over_by)
    owners: dict[int, tuple[Run, str] | None] = {}

    def owner(interval: _Interval | None) -> tuple[Run, str] | None:
        """The operation that an interval works for; None: the runtime's own work."""
        seen = []
        while interval is not None and interval.op is None and interval.task is not None:
            if interval.task in owners or interval.task in seen:
                break
            seen.append(interval.task)
            interval = handed_over_by.get(interval.task)
        if interval is None:
            found = None
        else:
            found = interval.op or (owners.get(interval.task) if interval.task is not None else None)
        owners.update(dict.fromkeys(seen, found))
        return found

    time: dict[Run, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    at_work: dict[Run, list[tuple[float, float]]] = collections.defaultdict(list)
    runtime = 0.0
    for interval, start, end in pieces:
        if (op := owner(interval)) is None:
            # A task of no operation is the one that waits for the whole program.
            runtime += (end - start) if interval.task is None else 0.0
        else:
            run, name = op
            time[run][name] += end - start
            at_work[run].append((start, end))
    for interval in intervals:  # Operations too short to have a time.
        if interval.op is not None:
            time[interval.op[0]][interval.op[1]] += 0.0
            at_work[interval.op[0]].append((interval.start, interval.start))
    return _finish(time, at_work, runtime)


def _intervals(line: Line, module: str | None) -> list[_Interval]:
    found, open_tasks = [], []
    for e in sorted(line.events, key=lambda e: e.start):
        if e.name == _TASK_BEGIN:
            open_tasks.append((e.start, e.stats.get("_c")))
        elif e.name == _TASK_END:
            if open_tasks:
                start, task = open_tasks.pop()
                found.append(_Interval(start, e.start, task=task))
        elif e.name == _EXECUTOR:
            found.append(_Interval(e.start, e.start + e.duration))
        elif (op := e.stats.get("hlo_op")) is not None:
            other = module is not None and e.stats.get("hlo_module", module) != module
            program, number, device = (int(e.stats.get(k, -1)) for k in ("program_id", "run_id", "device_ordinal"))
            run = Run(program, number, max(device, 0))
            found.append(_Interval(e.start, e.start + e.duration, op=None if other else (run, op)))
    return found


def _sweep(
    intervals: list[_Interval], points: list[tuple[float, int]], handed_over_by: dict[int, _Interval | None]
) -> list[tuple[_Interval, float, float]]:
    """Cuts a thread's time into pieces, each of the innermost interval there, and finds out who handed tasks over."""
    pieces, stack, at = [], [], 0.0
    # At the same moment: what ends, then what begins (the longest first), then what is handed over.
    moments = [(i.start, 1, -i.end, n) for n, i in enumerate(intervals)]
    moments += [(start, 2, 0.0, task) for start, task in points]
    for moment, kind, _, key in sorted(moments):
        while stack and stack[-1].end <= moment:
            ended = stack.pop()
            if ended.end > at:
                pieces.append((ended, at, ended.end))
                at = ended.end
        if kind == 2:
            handed_over_by[key] = stack[-1] if stack else None
            continue
        if stack and moment > at:
            pieces.append((stack[-1], at, moment))
        at = max(at, moment)
        stack.append(intervals[key])
    while stack:
        ended = stack.pop()
        if ended.end > at:
            pieces.append((ended, at, ended.end))
            at = ended.end
    return pieces


def _device_times(lines: list[Line], module: str | None) -> OpTimes:
    time: dict[Run, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    at_work: dict[Run, list[tuple[float, float]]] = collections.defaultdict(list)
    streams = [line for line in lines if "stream" in line.name.lower()]
    for line in streams or [line for line in lines if line.name in ("", "XLA Ops")]:
        device = int(line.plane.rpartition(":")[2]) if line.plane[-1].isdigit() else 0
        occurrences: collections.Counter[str] = collections.Counter()
        for e in sorted(line.events, key=lambda e: e.start):
            op = e.stats.get("hlo_op")
            if op is None or (module is not None and e.stats.get("hlo_module", module) != module):
                continue
            run = Run(int(e.stats.get("program_id", -1)), int(e.stats.get("run_id", occurrences[op])), device)
            occurrences[op] += 1
            time[run][op] += e.duration
            at_work[run].append((e.start, e.start + e.duration))
    return _finish(time, at_work, 0.0)


def _finish(time: Any, at_work: dict[Run, list[tuple[float, float]]], runtime: float) -> OpTimes:
    busy, begin, wall = {}, {}, {}
    for run, intervals in at_work.items():
        covered, end = 0.0, 0.0
        for a, b in sorted(intervals):
            covered += max(b - max(a, end), 0.0)
            end = max(end, b)
        begin[run] = min(a for a, _ in intervals)
        busy[run], wall[run] = covered, end - begin[run]
    return OpTimes({run: dict(ops) for run, ops in time.items()}, busy, begin, wall, runtime)
