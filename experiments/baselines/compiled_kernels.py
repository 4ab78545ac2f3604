"""Whose kernels are whose in a dense part that `torch.compile` has compiled.

A compiled graph calls kernels one after the other: library calls for products, and generated kernels that fuse what
lies between. No range tells them apart, but the compiler knows which nodes of its graph a kernel computes, and a node
keeps the stack of modules it was traced in; one of the backward pass has that of its forward node. Rules, in turn:

1. A node belongs to the region of its module. What no module computes is the loss.
2. A node of no operation of ours, such as sums of gradients and what the compiler's rewrites make, belongs where its
   largest input does, of a product and a sum the product's. This is inferred, and its share is stated.
3. A kernel belongs to the region that most of its nodes' elements are of. Kernels whose nodes are of several regions
   *span* them; their share is stated.

The kernels are those of an untraced run: the same compiler with the same options, but for two. Kernels announce
themselves to the profiler, and the compile cache, which keeps no graphs, is off.

All of this is of torch 2.13, whose internals it reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch._inductor import compile_fx, debug

from experiments.baselines.dense_part import REGION_OF_MODULE
from experiments.baselines.operator_events import Kernel
from jaxrec.profiling.regions import OTHER, REGIONS, Place

OPTIONS: dict[str, Any] = {
    "cpp.enable_kernel_profile": True,
    "trace.provenance_tracking_level": 1,
    "force_disable_caches": True,
}


@final
class KernelRecorder:
    """A backend of `torch.compile`: Inductor, which also records what it makes.

    Attributes:
      graphs: Whether of the backward pass -> the kernels of that graph in the order of their calls.
    """

    def __init__(self):
        self.graphs: dict[bool, list[Kernel]] = {}

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=self._compile, config_patches=OPTIONS)

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        with debug.reset_provenance_globals():
            compiled: Any = compile_fx.compile_fx_inner(graph, inputs, **options)
        backward = bool(options.get("is_backward"))
        # The compiler rewrites the graph in place: its nodes are now those that the kernels were made of.
        nodes = {node.name: node for node in graph.graph.nodes}
        called = json.loads(compiled.inductor_provenance_mapping_str)["cppCodeToPost"]
        self.graphs[backward] = [
            Kernel(call.rpartition(":")[0], place([nodes[n] for n in names if n in nodes], backward=backward))
            for call, names in sorted(called.items(), key=lambda item: int(item[0].rpartition(":")[2]))
        ]
        return compiled


def place(nodes: Sequence[torch.fx.Node], *, backward: bool) -> Place:
    """Returns where a kernel of these nodes belongs."""
    elements: dict[str, float] = {}
    inferred = 0.0
    for node in nodes:
        region, own = _region(node)
        elements[region] = elements.get(region, 0.0) + _elements(node)
        inferred += 0 if own else _elements(node)
    assert elements, "a kernel of no nodes"
    total = sum(elements.values())
    most = max(elements, key=elements.__getitem__)
    return Place(
        most,
        backward,
        inferred=inferred > total / 2,
        spans=tuple(r for r in REGIONS if r in elements),
        foreign=1 - elements[most] / total,
    )


def _region(node: torch.fx.Node) -> tuple[str, bool]:
    """Returns a node's region, and whether its own modules say so."""
    at, own = node, True
    while True:
        if stack := (at.meta.get("nn_module_stack") or at.meta.get("fwd_nn_module_stack")):
            return _of_stack(stack), own
        # Sums of gradients have a number, too: that of the node before.
        if "seq_nr" in at.meta and not at.meta.get("is_gradient_acc"):
            return "loss", own
        # A product to which a sum was fused is of the product's region: its first operand is what is added.
        operands = at.args[1:] if at.target is torch.ops.aten.addmm.default else at.all_input_nodes
        inputs = [i for i in operands if isinstance(i, torch.fx.Node) and i.op != "placeholder"]
        if not inputs:
            return OTHER, own
        at, own = max(inputs, key=_elements), False


def _of_stack(stack: dict[str, Any]) -> str:
    # Paths look like `L['model'].top_mlp.layers.0`: the model's own comes first.
    path = next(reversed(stack.values()))[0]
    return next((REGION_OF_MODULE[name] for name in path.split(".") if name in REGION_OF_MODULE), "interaction")


def _elements(node: torch.fx.Node) -> float:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    # At least 1, so that a kernel of scalars has a region.
    return max(1.0, sum(float(math.prod(v.shape)) for v in values if isinstance(v, torch.Tensor)))
