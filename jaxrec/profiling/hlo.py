"""The text of a compiled program as instructions, with the floating-point operations and the bytes of each.

Counted per instruction as it runs, so a fusion reads its operands and writes its result once:

- FLOPs: 2 M N K of a matrix product; 1 for each element of element-wise work, comparisons and bits included (as the
  compiler counts), and for each element that is reduced. What a loop fusion computes again counts again, at most.
- Bytes: operands read and result written. Of an operand that is sliced or gathered from, what is taken, where the
  compiler counts the whole; of an array that is scattered into or updated in place, twice what is changed. Rows taken
  or changed by index are counted apart (`random_bytes`): memory serves them more slowly than it copies.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxrec.kernels.embedding_bag import cpu, library
from jaxrec.profiling.collectives import ELEMENT_BYTES

COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .+ \{$")
_INSTRUCTION = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.+?) (?P<opcode>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}")

# Neither computes nor moves anything.
FREE = frozenset({
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier",
})  # fmt: skip
_ELEMENTWISE = frozenset({
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "power", "remainder", "negate", "abs", "exponential",
    "exponential-minus-one", "log", "log-plus-one", "logistic", "tanh", "sqrt", "rsqrt", "cbrt", "sine", "cosine",
    "erf", "and", "or", "xor", "not", "shift-left", "shift-right-logical", "shift-right-arithmetic", "compare",
    "select", "clamp", "floor", "ceil", "round-nearest-even", "sign", "is-finite", "atan2", "popcnt",
})  # fmt: skip
# Each element of the result needs the same element of each operand, or one element of it.
_ALIKE = frozenset({"bitcast", "reshape", "transpose", "copy", "convert", "reverse", "bitcast-convert", "tuple"})
_TAKES = frozenset({"gather", "dynamic-slice", "slice"})
_CHANGES = frozenset({"scatter", "dynamic-update-slice"})


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: As in the text, and in a trace, without `%`.
      opcode: `fusion`, `dot`, ...
      shapes: (element type, dimensions) of the result, or of each part of a tuple.
      operands: Names, of the same computation.
      op_name: JAX's path of what it came from, `jit(step)/transpose(jvp(loss))/mul`; empty where it has none.
      called: Names of computations.
      root: Whether it is its computation's result.
      text: The whole line.
    """

    name: str
    opcode: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    op_name: str
    called: tuple[str, ...]
    root: bool
    text: str

    @functools.cached_property
    def elements(self) -> int:
        """Of the result."""
        return sum(math.prod(dims) for _, dims in self.shapes)

    @functools.cached_property
    def result_bytes(self) -> int:
        """Of the result; types that have no whole bytes an element count as one."""
        return sum(ELEMENT_BYTES.get(kind, 1) * math.prod(dims) for kind, dims in self.shapes)

    @property
    def kernel(self) -> str:
        """Which operation of jaxrec's compiled kernels it calls; "" for all others."""
        called = _TARGET.search(self.text) if self.opcode == "custom-call" else None
        return library.operation_of(called[1]) if called else ""


class Work(NamedTuple):
    """What one execution takes.

    Attributes:
      product_flops: Of matrix products.
      other_flops: Of element-wise work and reductions.
      stream_bytes: Read and written in order.
      random_bytes: Read and written by index.
    """

    product_flops: float = 0.0
    other_flops: float = 0.0
    stream_bytes: float = 0.0
    random_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return self.product_flops + self.other_flops

    @property
    def bytes(self) -> float:
        return self.stream_bytes + self.random_bytes

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Returns the sum with `times` the other."""
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


class Module:
    """A compiled program.

    Attributes:
      name: `jit_train_step`.
      computations: Name -> its instructions by name, in order.
      entry: The name of the program's own computation.
      aliased: The parameters whose memory a result takes over.
    """

    def __init__(self, text: str):
        """Parses the text of `jax.stages.Compiled.as_text()`.

        Raises:
          ValueError: It is not a program's.
        """
        first = text.partition("\n")[0]
        if not first.startswith("HloModule "):
            raise ValueError(f"a program's text begins with HloModule, but this one with {first[:40]!r}")
        self.name = re.split(r"[ ,]", first)[1]
        self.aliased = {int(n) for n in _ALIAS.findall(first)}
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry, current = "", None
        for line in text.splitlines():
            if line.endswith("{") and (head := _HEAD.match(line)):
                current = self.computations.setdefault(head["name"], {})
                if head["entry"]:
                    self.entry = head["name"]
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current[match["name"]] = _instruction(line, match)
        if not self.entry:
            raise ValueError(f"the text of {self.name} has no ENTRY computation")

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions that run as operations of their own: those of the entry, of loops, branches and calls."""
        return {i.name: i for name in self._times for i in self.computations[name].values()}

    @functools.cached_property
    def _home(self) -> dict[str, str]:
        return {i: name for name in self._times for i in self.computations[name]}

    @functools.cached_property
    def _times(self) -> dict[str, float]:
        """How often each computation that runs by itself runs in one execution; a branch counts as taken."""
        times: dict[str, float] = {}

        def visit(name: str, count: float) -> None:
            times[name] = times.get(name, 0.0) + count
            for i in self.computations[name].values():
                if i.opcode in ("while", "call", "conditional", "async-start"):
                    trips = _TRIPS.search(i.text)
                    for called in i.called:
                        if called in self.computations:
                            visit(called, count * (int(trips[1]) if trips else 1))

        visit(self.entry, 1.0)
        return times

    def times(self, instruction: str) -> float:
        """How often an instruction runs in one execution; loops of unknown length count as one pass."""
        return self._times[self._home[instruction]]

    @property
    def endless_loops(self) -> int:
        """How many loops do not say how often they run."""
        return sum(i.opcode == "while" and not _TRIPS.search(i.text) for i in self.instructions.values())

    def neighbours(self, name: str) -> tuple[list[Instruction], list[Instruction]]:
        """Returns an instruction's operands and its users."""
        body = self.computations[self._home[name]]
        operands = [body[o] for o in body[name].operands if o in body]
        return operands, self._users[self._home[name]].get(name, [])

    @functools.cached_property
    def _users(self) -> dict[str, dict[str, list[Instruction]]]:
        """Computation -> instruction -> those that read it."""
        users: dict[str, dict[str, list[Instruction]]] = {}
        for name, body in self.computations.items():
            of_body = users.setdefault(name, {})
            for i in body.values():
                for operand in dict.fromkeys(i.operands):
                    of_body.setdefault(operand, []).append(i)
        return users

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields what a fusion is made of, its own fusions opened; of another instruction, itself."""
        if instruction.opcode != "fusion":
            yield instruction
            return
        for called in instruction.called:
            for i in self.computations.get(called, {}).values():
                yield from self.inside(i) if i.opcode == "fusion" else (i,)

    def evaluations(self, fusion: Instruction) -> dict[Instruction, float]:
        """Returns how many elements of each part of a fusion are computed, at most.

        A loop fusion computes each element of its result from its operands, with no store in between: what is computed
        before a broadcast is computed again for each element after it, unless the compiler moves it out of a loop (as
        it does with scalars).
        """
        body = self.computations.get(fusion.called[0], {}) if fusion.called else {}
        if "kind=kLoop" not in fusion.text:
            return {part: float(part.elements) for part in self.inside(fusion)}
        counts: dict[str, float] = {}
        for part in reversed(body.values()):
            count = max(counts.get(part.name, 0.0), float(part.elements) if part.root else 0.0)
            counts[part.name] = count
            for operand in (body[o] for o in part.operands if o in body):
                if operand.elements == 1 or part.opcode == "tuple":
                    needed = float(operand.elements)
                elif part.opcode in ("reduce", "reduce-window", "dot", "concatenate"):
                    needed = count * operand.elements / max(part.elements, 1)
                else:
                    needed = count
                counts[operand.name] = max(counts.get(operand.name, 0.0), needed)
        return {part: counts[part.name] for part in body.values()}

    def work(self, name: str) -> Work:
        """Returns the work of one execution of an instruction; loops and calls have none beside what they run."""
        i = self.instructions[name]
        if i.opcode in FREE or i.opcode in ("while", "call", "conditional", "async-start"):
            return Work()
        home = self.computations[self._home[name]]
        if i.opcode == "fusion":
            body = self.computations.get(i.called[0], {}) if i.called else {}
            return self._fusion_work(i, body, home)
        return Work(*_flops(i, home), *_bytes(i, home))

    def _fusion_work(self, fusion: Instruction, body: dict[str, Instruction], home: dict[str, Instruction]) -> Work:
        streamed, random = _demands(body)
        counts = {part.name: count for part, count in self.evaluations(fusion).items()}
        work = Work()
        for i in body.values():
            if i.opcode == "fusion":
                inner = self._fusion_work(i, self.computations.get(i.called[0], {}), body)
                work = work.plus(Work(inner.product_flops, inner.other_flops))
            elif i.opcode in _ELEMENTWISE:
                work = work.plus(Work(other_flops=counts.get(i.name, 0.0)))
            else:
                work = work.plus(Work(*_flops(i, body)))
        for i in body.values():
            number = _PARAMETER.search(i.text) if i.opcode == "parameter" else None
            # A fusion inside a tuple's parts reads whole tuples: what is not an array has no bytes here.
            if number and int(number[1]) < len(fusion.operands) and fusion.operands[int(number[1])] in home:
                item = i.result_bytes / max(i.elements, 1)
                work = work.plus(Work(0, 0, item * streamed.get(i.name, 0.0), item * random.get(i.name, 0.0)))
        roots = [i for i in body.values() if i.root]
        if roots and roots[0].opcode == "tuple":
            roots = [body[o] for o in roots[0].operands if o in body]
        written = sum(i.result_bytes for i in roots if not _in_place(i, body))
        return work.plus(Work(stream_bytes=written))


def _in_place(i: Instruction, body: dict[str, Instruction]) -> bool:
    """Whether an instruction of a fusion changes one of the fusion's operands, and writes nothing else."""
    while i.opcode == "bitcast" and i.operands[0] in body:
        i = body[i.operands[0]]
    if i.opcode not in _CHANGES:
        return False
    changed = body.get(i.operands[0])
    while changed is not None and changed.opcode == "bitcast":
        changed = body.get(changed.operands[0])
    return changed is not None and changed.opcode == "parameter"


def _demands(body: dict[str, Instruction]) -> tuple[dict[str, float], dict[str, float]]:
    """Returns, for the instructions of a fusion, how many elements of each are needed in order, and by index.

    A fusion computes no more than what its root needs: of an array that is scaled and then sliced, it reads the slice.
    """
    streamed: dict[str, float] = {}
    random: dict[str, float] = {}

    def need(name: str, elements: float) -> None:
        if name in body:
            streamed[name] = min(streamed.get(name, 0.0) + elements, float(body[name].elements))

    for i in reversed(body.values()):
        if i.root:
            streamed[i.name] = float(i.elements)
        wanted, by_index = streamed.get(i.name, 0.0), random.get(i.name, 0.0)
        if not (wanted or by_index) or not i.operands:
            continue
        first, *others = i.operands
        if i.opcode == "bitcast":
            random[first] = random.get(first, 0.0) + by_index
        if i.opcode in _ALIKE or i.opcode in _ELEMENTWISE:
            for operand in i.operands:
                need(operand, wanted)
            continue
        for operand in others:
            need(operand, float(body[operand].elements) if operand in body else 0.0)
        if i.opcode == "gather":
            random[first] = random.get(first, 0.0) + wanted
        elif i.opcode in _TAKES:
            need(first, wanted)
        elif i.opcode in _CHANGES and _in_place(i, body):
            changed = 2.0 * body[i.operands[2 if i.opcode == "scatter" else 1]].elements
            if i.opcode == "scatter":
                random[first] = random.get(first, 0.0) + changed
            else:
                need(first, changed)
        else:
            need(first, float(body[first].elements) if first in body else 0.0)
    return streamed, random


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    end, depth = match.end(), 1
    while depth and end < len(line):
        depth += (line[end] == "(") - (line[end] == ")")
        end += 1
    attributes = line[end:]
    branches = _BRANCHES.search(attributes)
    called = _CALLED.findall(attributes) + (_OPERAND.findall(branches[1]) if branches else [])
    op_name = _OP_NAME.search(attributes)
    return Instruction(
        match["name"],
        match["opcode"],
        tuple((kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _ARRAY.findall(match["shape"])),
        tuple(_OPERAND.findall(line[match.end() : end])),
        op_name[1] if op_name else "",
        tuple(called),
        match["root"] is not None,
        line.strip(),
    )


def _flops(i: Instruction, body: dict[str, Instruction]) -> tuple[float, float]:
    """Returns (of matrix products, other)."""
    is_product = i.opcode == "dot" or (i.opcode == "custom-call" and ("gemm" in i.text or "matmul" in i.text))
    if is_product and i.operands and i.operands[0] in body and (contracted := _CONTRACTED.search(i.text)):
        dims = body[i.operands[0]].shapes[0][1]
        depth = math.prod(dims[int(d)] for d in contracted[1].replace('"', "").split(",") if d)
        return 2.0 * math.prod(i.shapes[0][1]) * depth, 0.0
    if i.opcode in _ELEMENTWISE:
        return 0.0, float(i.elements)
    if i.opcode in ("reduce", "reduce-window") and i.operands and i.operands[0] in body:
        return 0.0, float(body[i.operands[0]].elements)
    if i.opcode == "scatter" and len(i.operands) > 2 and i.operands[2] in body:
        return 0.0, float(body[i.operands[2]].elements)
    return 0.0, 0.0


def _bytes(i: Instruction, body: dict[str, Instruction]) -> tuple[float, float]:
    """Returns (streamed, random) of an instruction that is not a fusion."""
    if operation := i.kernel:
        operands = [(body[o].result_bytes, body[o].shapes[0][1]) for o in i.operands if o in body]
        return cpu.moved_bytes(operation, operands, i.result_bytes)
    others = float(sum(body[o].result_bytes for o in i.operands[1:] if o in body))
    if i.opcode == "gather":
        return others + i.result_bytes, float(i.result_bytes)
    if i.opcode in _TAKES:
        return 2.0 * i.result_bytes, 0.0
    if i.opcode in _CHANGES:
        changed = _changed_bytes(i, body)
        return (others, changed) if i.opcode == "scatter" else (others + changed, 0.0)
    first = body[i.operands[0]].result_bytes if i.operands and i.operands[0] in body else 0
    return first + others + i.result_bytes, 0.0


def _changed_bytes(i: Instruction, body: dict[str, Instruction]) -> float:
    """Of an update: what is changed is read, or at least fetched, and written."""
    updates = i.operands[2 if i.opcode == "scatter" else 1]
    return 2.0 * body[updates].result_bytes if updates in body else 0.0
