"""What the compiler made of a step: work, memory, fusions, collectives, donated buffers that no result took over."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxrec.profiling.collectives import ELEMENT_BYTES, Collective, collectives
from jaxrec.profiling.hlo import FREE, Module, Work

# Beyond this the compiler's FLOPs of matrix products and the model's own are said to differ.
FLOPS_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """A compiled program, per device.

    Attributes:
      compiler_flops: By the compiler's cost analysis; None where it has none, as on GPUs.
      compiler_bytes: Likewise.
      work: Counted from the program's text, see `hlo`.
      model_flops: What the model's matrix products need by definition.
      memory: Kind -> bytes: argument, output, alias, temp, generated_code, and peak where it is told.
      operations: Instructions that run on their own.
      fusions: How many of them are fusions.
      collectives: See `collectives`.
      not_aliased: Donated array -> bytes that no result takes over, the largest first; they cost a copy.
      loops_of_unknown_length: Their bodies are counted once.
    """

    compiler_flops: float | None
    compiler_bytes: float | None
    work: Work
    model_flops: float
    memory: dict[str, int]
    operations: int
    fusions: int
    collectives: list[Collective]
    not_aliased: dict[str, int]
    loops_of_unknown_length: int

    @property
    def difference(self) -> str:
        """Says in a sentence how the program's matrix products differ from the model's; empty where they do not."""
        if not self.model_flops:
            return ""
        ratio = self.work.product_flops / self.model_flops
        if abs(ratio - 1) <= FLOPS_TOLERANCE:
            return ""
        way = "more" if ratio > 1 else "fewer"
        return (
            f"the program's matrix products take {self.work.product_flops / 1e9:.4g} GFLOPs, {abs(ratio - 1):.0%} "
            f"{way} than the model's definition ({self.model_flops / 1e9:.4g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        moved = [{**c._asdict(), "received_bytes": c.received_bytes} for c in self.collectives]
        return {**dataclasses.asdict(self), "work": self.work._asdict(), "collectives": moved}


def describe(compiled: Any, module: Module, model_flops: float = 0.0) -> ProgramFacts:
    """Reads a `jax.stages.Compiled`.

    Args:
      compiled: The program.
      module: Its text, parsed.
      model_flops: Of the model's matrix products on one device; 0: not known.
    """
    cost = compiled.cost_analysis()
    cost = (cost[0] if isinstance(cost, list) else cost) or {}
    analysis, memory = compiled.memory_analysis(), {}
    for kind in ("argument", "output", "alias", "temp", "generated_code", "peak_memory"):
        size = getattr(analysis, f"{kind}_in_bytes" if kind == "peak_memory" else f"{kind}_size_in_bytes", None)
        if size is not None:
            memory[kind.removesuffix("_memory")] = int(size)
    running = [i for i in module.instructions.values() if i.opcode not in FREE]
    return ProgramFacts(
        compiler_flops=cost.get("flops"),
        compiler_bytes=cost.get("bytes accessed"),
        work=total_work(module),
        model_flops=model_flops,
        memory=memory,
        operations=len(running),
        fusions=sum(i.opcode == "fusion" for i in running),
        collectives=collectives(compiled),
        not_aliased=not_aliased(compiled, module),
        loops_of_unknown_length=module.endless_loops,
    )


def total_work(module: Module) -> Work:
    """Returns the work of one execution."""
    work = Work()
    for name in module.instructions:
        work = work.plus(module.work(name), module.times(name))
    return work


def not_aliased(compiled: Any, module: Module) -> dict[str, int]:
    """Returns the donated arrays whose memory no result takes over, with their bytes, the largest first.

    Donated arrays that the program does not read are no parameters of it, and are left out.
    """
    parameters = {}
    for i in module.computations[module.entry].values():
        if i.opcode == "parameter":
            parameters[int(i.text.split(" parameter(")[1].split(")")[0])] = i
    arguments = iter(jax.tree_util.tree_flatten_with_path(compiled.args_info)[0])
    found = {}
    for number in sorted(parameters):
        parameter = parameters[number]
        name = parameter.op_name.replace("\\'", "'")
        # Arguments that are not read have no parameter; the rest come in order, named by their paths.
        for path, argument in arguments:
            if name.endswith(jax.tree_util.keystr(path[2:])):
                kind, dims = parameter.shapes[0]
                if argument.donated and number not in module.aliased:
                    found[name] = ELEMENT_BYTES.get(kind, 1) * math.prod(dims)
                break
    return dict(sorted(found.items(), key=lambda item: -item[1]))
