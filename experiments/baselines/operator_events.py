"""The regions of a trace of `torch.profiler`: whose time each operator's is. Needs no PyTorch.

An operator's own time is that of its event without the events nested in it. It is wall time of the thread that called
it: the threads of a pool that help it are not in the trace. Rules, in turn:

1. In a compiled graph: the kernel's place, by the order of calls. Where calls are not those that the compiler
   announced, the graph has none.
2. Below a node of the backward pass: the region of the forward operator that made the node; both have one sequence
   number. From the lookup's node on, all is `embedding_update`, and counted as forward: so it is in jaxrec, whose
   `embedding_update` goes from the pooled vectors' gradients to the written rows and is no part of a backward pass.
3. A gradient that is put into its parameter, or kept for the tables: where the node before it belongs; after a compiled
   graph, where what alone has its shape belongs. This is inferred, and its share is stated.
4. The innermost range with a region's name.

What is left is listed by name. What the autograd engine and `torch.compile` do around operators is `runtime_ms`. On a
GPU the operators are its kernels and copies, each of the operator that started it (**not run yet**).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrec.profiling.regions import OTHER, REGIONS, Place, Regions, RegionTime

STEP = "ProfilerStep#"
_ENGINE = "autograd::engine::evaluate_function: "
_GRAPH = "## Call CompiledFxGraph"
_ACCUMULATE = "AccumulateGrad"
_RUNTIME = (
    _ENGINE, _GRAPH, "TorchDynamo Cache Lookup", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher Runtime",
    "CompiledFunction",
)  # fmt: skip
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_SEQUENCE = "Sequence number"


class Kernel(NamedTuple):
    """A call in a compiled graph: its kernel, as the compiler calls it (`cpp_fused_relu_0`), and its place."""

    name: str
    place: Place


# Whether of the backward pass -> the calls of that graph, in order.
Graphs = Mapping[bool, Sequence[Kernel]]


@dataclasses.dataclass(eq=False)
class _Event:
    """An event, where it stands in its thread; times in us."""

    raw: dict[str, Any]
    parent: _Event | None
    children: list[_Event] = dataclasses.field(default_factory=list)
    place: Place | None = None

    @property
    def name(self) -> str:
        return self.raw["name"]

    @property
    def start(self) -> float:
        return self.raw["ts"]

    @property
    def end(self) -> float:
        return self.raw["ts"] + self.raw["dur"]

    @property
    def own(self) -> float:
        return max(self.raw["dur"] - sum(c.raw["dur"] for c in self.children), 0.0)

    @property
    def is_operator(self) -> bool:
        return self.raw["cat"] == "cpu_op" and not self.name.startswith(_RUNTIME)

    def enclosing(self) -> Iterator[_Event]:
        """Yields what it is nested in, the innermost first."""
        at = self.parent
        while at is not None:
            yield at
            at = at.parent


def attribute(
    trace: Iterable[dict[str, Any]],
    graphs: Graphs,
    shapes: Mapping[tuple[int, ...], str] | None = None,
    *,
    skip: int = 0,
) -> Regions:
    """Adds up operators' time by region; writes each operator's place into its event's arguments, as `region`.

    Args:
      trace: Events of a Chrome trace, with a range `ProfilerStep#k` around each step.
      graphs: Of the compiled part, where there is one.
      shapes: Of its parameters and of the pooled vectors -> the region that alone has one of this shape.
      skip: Steps, the first, that are left out.

    Returns:
      Wall time where jaxrec's regions have thread time.

    Raises:
      ValueError: The trace has no steps after those.
    """
    trace = list(trace)
    events = _nested([e for e in trace if e["ph"] == "X" and e.get("cat") in ("cpu_op", "user_annotation")])
    _place(events, graphs, shapes or {})
    steps = sorted((e for e in events if e.name.startswith(STEP)), key=lambda e: e.start)[skip:]
    if not steps:
        raise ValueError(f"the trace has no range {STEP}k after the first {skip}")
    runtime = sum(
        e.own for e in events if e.raw["cat"] == "cpu_op" and not e.is_operator and _step(e, steps) is not None
    )
    operators = [(e.raw, e.place or Place(OTHER, False), e.own, e) for e in events if e.is_operator]
    if any(e.get("cat") in _DEVICE for e in trace):
        operators = list(_on_device(trace, events))
    op_ms: dict[str, float] = collections.defaultdict(float)
    places: dict[str, Place] = {}
    sums: dict[str, tuple[list[float], list[float]]] = {
        r: ([0.0] * len(steps), [0.0] * len(steps)) for r in (*REGIONS, OTHER)
    }
    at_work: list[tuple[float, float]] = []
    for raw, place, own, launcher in operators:
        k = _step(launcher, steps)
        if k is None:
            continue
        raw.setdefault("args", {})["region"] = str(place)
        name = f"{raw['name']} in {place}"
        places[name] = place
        op_ms[name] += own / 1e3 / len(steps)
        sums[place.region][place.backward][k] += own / 1e3
        at_work.append((raw["ts"], raw["ts"] + raw["dur"]))
    total = sum(op_ms.values())
    longest = sorted(op_ms, key=lambda name: -op_ms[name])
    wall = sum(s.raw["dur"] for s in steps)
    times = {r: RegionTime(tuple(f), tuple(b)) for r, (f, b) in sums.items() if r == OTHER or any(f) or any(b)}

    def share(weights: Mapping[str, float]) -> float:
        return sum(op_ms[name] * weight for name, weight in weights.items()) / total if total else 0.0

    return Regions(
        devices={0: times},
        op_ms={name: op_ms[name] for name in longest},
        op_place={name: str(places[name]) for name in longest},
        other_ms={
            name.removesuffix(f" in {places[name]}"): op_ms[name] for name in longest if places[name].region == OTHER
        },
        inferred_share=share({name: float(place.inferred) for name, place in places.items()}),
        spanning_share=share({name: float(len(place.spans) > 1) for name, place in places.items()}),
        foreign_share=share({name: place.foreign for name, place in places.items()}),
        collective_share=0.0,
        unknown_ms={},
        total_ms=total,
        wall_ms=tuple(s.raw["dur"] / 1e3 for s in steps),
        busy_share=_covered(at_work) / wall,
        runtime_ms=runtime / 1e3 / len(steps),
    )


def _nested(trace: list[dict[str, Any]]) -> list[_Event]:
    """Finds out what is nested in what; returns the events in the order in which they began."""
    found: list[_Event] = []
    stacks: dict[Any, list[_Event]] = collections.defaultdict(list)
    for raw in sorted(trace, key=lambda e: (e["ts"], -e["dur"])):
        stack = stacks[raw["pid"], raw["tid"]]
        while stack and stack[-1].end <= raw["ts"]:
            stack.pop()
        event = _Event(raw, stack[-1] if stack else None)
        if stack:
            stack[-1].children.append(event)
        stack.append(event)
        found.append(event)
    return found


def _place(events: list[_Event], graphs: Graphs, shapes: Mapping[tuple[int, ...], str]) -> None:
    """Sets the places of events, in the order in which they began."""
    made_by: dict[int, str | None] = {}  # Sequence number -> the region of the forward operator.
    for e in events:
        number = e.raw.get("args", {}).get(_SEQUENCE)
        if number is not None and not any(a.name.startswith(_ENGINE) for a in (e, *e.enclosing())):
            # A number is that of the next node. Operators that make none have it, too: the last one with it made it.
            made_by[number] = _range(e)
    before: dict[Any, Place | None] = {}  # Thread -> where its last node belongs.
    for e in events:
        if e.name.startswith(_GRAPH):
            backward = any(a.name.startswith(_ENGINE) for a in e.enclosing())
            for child, place in zip(e.children, _in_order(e.children, graphs.get(backward, ())), strict=True):
                child.place = place
        elif e.name.startswith(_ENGINE):
            thread = e.raw["pid"], e.raw["tid"]
            if _ACCUMULATE in e.name:
                node, region = before.get(thread), shapes.get(_shape(e) or ())
                if node is None and region is not None:
                    node = _of_backward(region)
                e.place = dataclasses.replace(node, inferred=True) if node else None
            else:
                region = made_by.get(e.raw.get("args", {}).get(_SEQUENCE, -1))
                e.place = before[thread] = _of_backward(region) if region else None
        elif e.place is None:
            within = next((a for a in e.enclosing() if a.is_operator or a.name.startswith((_ENGINE, _GRAPH))), None)
            if within is not None:
                # Of a compiled graph's own work there is no telling.
                e.place = None if within.name.startswith(_GRAPH) else within.place
            elif (region := _range(e)) is not None:
                e.place = Place(region, False)


def _of_backward(region: str) -> Place:
    return Place("embedding_update", False) if region == "embedding_lookup" else Place(region, True)


def _shape(event: _Event) -> tuple[int, ...] | None:
    """Returns the shape of the first tensor that an event, or one nested in it, takes."""
    if dims := [d for d in event.raw.get("args", {}).get("Input Dims", ()) if d]:
        return tuple(dims[0])
    return next((shape for child in event.children if (shape := _shape(child))), None)


def _range(event: _Event) -> str | None:
    return next((a.name for a in event.enclosing() if a.name in REGIONS), None)


def _in_order(called: Sequence[_Event], announced: Sequence[Kernel]) -> Iterable[Place | None]:
    """Returns the places of a graph's calls; none where they are not what the compiler announced."""

    def same(event: _Event, kernel: Kernel) -> bool:
        # aten::mm is extern_kernels.mm; graph_0_cpp_fused_relu_0 is cpp_fused_relu_0, and either may be cut short.
        a, b = event.name.replace("aten::", "extern_kernels."), kernel.name
        a = a.partition("_cpp_")[1][1:] + a.partition("_cpp_")[2] or a
        return b.startswith(a) or a.startswith(b)

    if len(called) != len(announced) or not all(map(same, called, announced)):
        return [None] * len(called)
    return [kernel.place for kernel in announced]


def _on_device(
    trace: list[dict[str, Any]], events: list[_Event]
) -> Iterator[tuple[dict[str, Any], Place, float, _Event]]:
    """Yields the work of a GPU, with the place of what started it."""
    by_id = {e.raw["args"]["External id"]: e for e in events if "External id" in e.raw.get("args", {})}
    for raw in trace:
        if raw.get("cat") in _DEVICE and (launcher := by_id.get(raw.get("args", {}).get("External id"))) is not None:
            yield raw, launcher.place or Place(OTHER, False), raw["dur"], launcher


def _step(event: _Event, steps: Sequence[_Event]) -> int | None:
    """Returns which of the steps an event began in; of any thread."""
    return next((k for k, s in enumerate(steps) if s.start <= event.start < s.end), None)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    covered, end = 0.0, 0.0
    for a, b in sorted(intervals):
        covered += max(b - max(a, end), 0.0)
        end = max(end, b)
    return covered
