"""One trace of several stacks, one below the other on one time axis, for Perfetto.

Takes what `jax.profiler` (`perfetto_trace.json.gz`, `*.trace.json.gz`) and `torch.profiler` (`export_chrome_trace`)
write, both in the trace event format. A stack becomes a process, whose first kept step begins at 0. What is kept of it:

- a track with the steps;
- its operations, the longest first, on a track for each thread that ran some, their region as category and argument;
- on JAX's side `task`, which is what an operation handed to another thread: JSON does not say which operation;
- flows (forward to backward) between operations that are kept.

All else is dropped, and with it the names of machine, user and files: a merged trace can be published.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrec.checks import UserError, require
from jaxrec.profiling.regions import OTHER, REGIONS

# How the two profilers name a step.
_STEP = re.compile(r"train$|ProfilerStep#\d+$")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_TASK_BEGIN, _TASK_END = "ThreadpoolListener::StartRegion", "ThreadpoolListener::StopRegion"
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[/\\][^\s/\\:<>(),]+)+[/\\]([^\s/\\:<>(),]+)")
TASK, STEP = "task", "step"


@dataclasses.dataclass(frozen=True)
class Side:
    """A stack's trace.

    Attributes:
      name: Of the stack: `jax`, `pytorch-compiled`.
      path: Its trace, JSON or gzipped JSON.
      places: Operation -> its region and pass, as `Regions.op_place` has it, where events do not carry theirs.
    """

    name: str
    path: Path
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _Slice(NamedTuple):
    """Something that takes time on a thread; us."""

    name: str
    category: str
    thread: Any
    start: float
    duration: float
    args: dict[str, Any]


def merge(sides: Sequence[Side], *, skip: int = 1, steps: int = 3, operations: int = 3000) -> dict[str, Any]:
    """Returns the merged trace, as the trace event format has it.

    Args:
      sides: From top to bottom.
      skip: Steps of each side, the first, that are left out.
      steps: Steps of each side that are kept, at most.
      operations: Operations and tasks of each side that are kept, the longest, over all its steps.

    Raises:
      UserError: A file that is no trace, or one with too few steps.
    """
    events: list[dict[str, Any]] = []
    for pid, side in enumerate(sides, 1):
        events += _side(side, pid, skip, steps, operations)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write(merged: Mapping[str, Any], path: Path) -> None:
    """Writes a merged trace, gzipped; the same trace gives the same bytes."""
    text = json.dumps(merged, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, mtime=0))


def read(path: Path) -> list[dict[str, Any]]:
    """Returns a trace's events.

    Raises:
      UserError: The file is no trace.
    """
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
        trace = json.loads(content)
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        # JAX's ends with an empty event.
        return [e for e in events if isinstance(e.get("pid"), int) and "name" in e]
    except (OSError, EOFError, ValueError, KeyError, AttributeError) as e:
        raise UserError(f"{path.name} is no trace in JSON or gzipped JSON ({type(e).__name__}: {e})") from e


def _side(side: Side, pid: int, skip: int, most_steps: int, most_operations: int) -> Iterator[dict[str, Any]]:
    events = read(side.path)
    complete = [e for e in events if e["ph"] == "X" and "dur" in e]
    markers = sorted((e for e in complete if _is_step(e)), key=lambda e: e["ts"])[skip : skip + most_steps]
    require(bool(markers), f"{side.path.name} has no steps after the first {skip}, but a merged trace needs some")
    begin, end = markers[0]["ts"], max(e["ts"] + e["dur"] for e in markers)
    longest_task = 0.9 * min(e["dur"] for e in markers)
    slices = [
        *(_operation(e, side.places) for e in complete if _is_operation(e)),
        # The task that runs as long as the program does is the one that waits for it.
        *(t for t in _tasks(complete) if t.duration < longest_task),
    ]
    slices = [s for s in slices if begin <= s.start and s.start + s.duration <= end]
    slices = sorted(slices, key=lambda s: -s.duration)[:most_operations]
    slices.sort(key=lambda s: (s.start, -s.duration))
    names = _track_names(slices, events)
    tracks = {thread: tid for tid, thread in enumerate(names, 2)}
    yield _metadata(pid, 0, "process_name", name=side.name)
    yield _metadata(pid, 0, "process_sort_index", sort_index=pid)
    yield _metadata(pid, 1, "thread_name", name="steps")
    for thread, tid in tracks.items():
        yield _metadata(pid, tid, "thread_name", name=names[thread])
        yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)

    def event(s: _Slice, tid: int) -> dict[str, Any]:
        start, stop = round(s.start - begin, 3), round(s.start + s.duration - begin, 3)
        return {
            "ph": "X", "name": s.name, "cat": s.category, "pid": pid, "tid": tid, "ts": start,
            "dur": round(stop - start, 3), "args": s.args,
        }  # fmt: skip

    for k, e in enumerate(markers, skip):
        yield event(_Slice(f"step {k}", STEP, None, e["ts"], e["dur"], {STEP: k}), 1)
    for s in slices:
        yield event(s, tracks[s.thread])
    yield from _flows(events, slices, lambda thread: tracks[thread], f"{side.name}:", pid, begin)


def _is_step(e: Mapping[str, Any]) -> bool:
    return _STEP.match(e["name"]) is not None and e.get("cat", "user_annotation") == "user_annotation"


def _is_operation(e: Mapping[str, Any]) -> bool:
    category = e.get("cat")
    in_range = category == "user_annotation" and e["name"] in REGIONS
    return in_range or category == "cpu_op" or category in _DEVICE or "hlo_op" in e.get("args", {})


def _operation(e: Mapping[str, Any], places: Mapping[str, str]) -> _Slice:
    args = e.get("args", {})
    place = args.get("region") or places.get(args.get("hlo_op", e["name"]))
    if place is None and e["name"] in REGIONS:
        place = e["name"]
    region = (place or OTHER).split(" ")[0]
    # Regions are words of ours; all other arguments may hold paths.
    region = region if region in REGIONS else OTHER
    kept = {"region": place} if place is not None and region != OTHER else {}
    return _Slice(_PATH.sub(r"\1", e["name"]), region, _thread(e), e["ts"], e["dur"], kept)


def _tasks(events: Iterable[Mapping[str, Any]]) -> Iterator[_Slice]:
    """Yields what threads did between the begin and the end of a task, which are events of their own."""
    open_tasks: dict[Any, list[float]] = {}
    for e in sorted((e for e in events if e["name"] in (_TASK_BEGIN, _TASK_END)), key=lambda e: e["ts"]):
        stack = open_tasks.setdefault(_thread(e), [])
        if e["name"] == _TASK_BEGIN:
            stack.append(e["ts"])
        elif stack:
            start = stack.pop()
            yield _Slice(TASK, TASK, _thread(e), start, e["ts"] - start, {})


def _thread(e: Mapping[str, Any]) -> Any:
    return e["pid"], e.get("tid", 0)


def _track_names(slices: Sequence[_Slice], events: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """Returns thread -> the name of its track, the busiest first; the traces' own names may tell too much."""
    processes = {e["pid"]: str(e.get("args", {}).get("name")) for e in events if e["name"] == "process_name"}
    on_device = {_thread(e) for e in events if e.get("cat") in _DEVICE}
    time: dict[Any, float] = {}
    for s in slices:
        time[s.thread] = time.get(s.thread, 0.0) + s.duration
    ordered = sorted(time, key=lambda thread: -time[thread])
    kinds = ["device stream" if t in on_device or "/device:" in processes.get(t[0], "") else "thread" for t in ordered]
    return {t: f"{kind} {kinds[: k + 1].count(kind)}" for k, (t, kind) in enumerate(zip(ordered, kinds, strict=True))}


def _flows(
    events: Sequence[Mapping[str, Any]], slices: Sequence[_Slice], track: Any, prefix: str, pid: int, begin: float
) -> Iterator[dict[str, Any]]:
    """Yields the arrows whose two ends are at slices that are kept."""
    starts = {(s.thread, s.start) for s in slices}
    ends: dict[Any, list[Mapping[str, Any]]] = {}
    for e in events:
        if e["ph"] in ("s", "f") and (_thread(e), e["ts"]) in starts:
            ends.setdefault(e.get("id"), []).append(e)
    for number, pair in ends.items():
        if sorted(e["ph"] for e in pair) != ["f", "s"]:
            continue
        for e in sorted(pair, key=lambda e: e["ph"], reverse=True):
            at_begin = {"bp": "e"} if e["ph"] == "f" else {}
            yield {
                "ph": e["ph"], "name": "forward to backward", "cat": "flow", "id": f"{prefix}{number}", "pid": pid,
                "tid": track(_thread(e)), "ts": round(e["ts"] - begin, 3), **at_begin,
            }  # fmt: skip


def _metadata(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
