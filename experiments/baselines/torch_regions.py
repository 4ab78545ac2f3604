"""Where does a step of PyTorch spend its time? The regions that jaxrec's profile has, forward and backward.

    python -m experiments.baselines.torch_regions --config=dlrm_balanced --stack=pytorch-compiled

Times are wall times. An operator's is that of the thread which called it, as the profiler does not see the threads that
help; jaxrec's regions are thread time. In a comparison, what stands beside them is jaxrec's wall column
(`jaxrec.profiling.roofline.wall_of_thread_time`).
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from absl import flags

from experiments.baselines.jax_stack import initial_arrays
from experiments.baselines.operator_events import STEP, attribute
from experiments.baselines.stacks import OPTIMIZERS, builder, paired
from jaxrec import flags as jaxrec_flags
from jaxrec.checks import require
from jaxrec.configs import catalogue, overrides
from jaxrec.data.pipeline import Batches
from jaxrec.profiling.regions import Regions

if TYPE_CHECKING:
    from experiments.baselines.torch_stack import Inputs, TorchStack

FILE = "torch_trace.json.gz"
WARM_UP = 2


def profile(stack: TorchStack, inputs: Sequence[Inputs], steps: int, folder: Path) -> tuple[Regions, Path]:
    """Traces steps of a stack, after two untraced ones and one that is traced and left out.

    A compiled part is compiled anew for it, which takes its time, so that its kernels can be told apart; afterwards the
    stack has its former one.

    Args:
      stack: Of `torch_stack`; its weights change.
      inputs: Batches from its `put`, taken in turn.
      steps: How many to trace.
      folder: Where the trace goes.

    Returns:
      The regions, in wall time, and the path of the trace, in which operators have their region as an argument.
    """
    import torch

    from experiments.baselines.compiled_kernels import KernelRecorder

    recorder = KernelRecorder()
    if stack.compiled:
        stack.compile_dense_part(recorder)
    try:
        turn = 0
        for turn in range(WARM_UP):
            stack.step(inputs[turn % len(inputs)])
        stack.wait()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Shapes tell the parameters' gradients apart after a compiled backward pass.
        with torch.profiler.profile(activities=activities, record_shapes=stack.compiled) as profiler:
            for k in range(steps + 1):
                with torch.profiler.record_function(f"{STEP}{k}"):
                    stack.step(inputs[(turn + 1 + k) % len(inputs)])
                    stack.wait()
    finally:
        if stack.compiled:
            stack.compile_dense_part()
    trace = _exported(profiler)
    regions = attribute(
        trace["traceEvents"], recorder.graphs, _shapes(stack, inputs[0]) if stack.compiled else {}, skip=1
    )
    path = folder / FILE
    with gzip.open(path, "wt") as f:
        json.dump(trace, f)
    return regions, path


def _shapes(stack: TorchStack, inputs: Inputs) -> dict[tuple[int, ...], str]:
    """Returns shape -> region, of what no other region has in this shape: dense parameters and pooled vectors."""
    from experiments.baselines.dense_part import REGION_OF_MODULE

    found = {shape: {"embedding_lookup"} for shape in stack.pooled_shapes(inputs)}
    for name, parameter in stack.parameters.items():
        found.setdefault(tuple(parameter.shape), set()).add(REGION_OF_MODULE[name.split("/")[0]])
    return {shape: regions.pop() for shape, regions in found.items() if len(regions) == 1}


def _exported(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())


def define_flags() -> None:
    flags.DEFINE_string("config", "dlrm_balanced", "Named config on synthetic rows.")
    flags.DEFINE_multi_string("set", [], "path=value: sets any field of the config; may be repeated.")
    flags.DEFINE_string("stack", "pytorch-compiled", f"One of {', '.join(OPTIMIZERS)}.")
    flags.DEFINE_string("device", "cpu", "As torch names it: cpu, cuda.")
    flags.DEFINE_integer("steps", 5, "Traced steps.")
    flags.DEFINE_string("workdir", None, f"Folder for {FILE}; none is kept where it is not given.")


def main() -> int:
    """Prints the table; returns the exit status."""
    values = flags.FLAGS
    require(values.steps >= 1, f"--steps is {values.steps}, but must be at least 1")
    workdir = values.workdir
    require(
        not workdir or Path(workdir).is_dir() or not Path(workdir).exists(),
        f"--workdir is {workdir!r}, which is a file, but must be a folder",
    )
    config = paired(overrides.apply(catalogue.get(values.config), values.set), values.stack)
    build = builder(values.stack, values.device)
    dataset = config.data.open("")
    stack: Any = build(config, dataset, initial_arrays(config, dataset))
    stream = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)
    inputs = [stack.put(stream[k].batch) for k in range(min(4, len(stream)))]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(workdir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        regions, path = profile(stack, inputs, values.steps, folder)
        for line in report(regions):
            print(line)
        if workdir:
            print(f"written     {path.name} in the workdir")
    return 0


def report(regions: Regions) -> list[str]:
    """Returns what is printed, line by line."""
    lines = [f"{'region':<17} {'forward ms':>10} {'backward ms':>11} {'share':>6}  spread of both"]
    for name, of_region in regions.mean().items():
        samples = of_region.samples
        share = sum(samples) / len(samples) / regions.total_ms if regions.total_ms else 0.0
        lines.append(
            f"{name:<17} {median(of_region.forward):>10.3f} {median(of_region.backward):>11.3f} {share:>6.1%}  "
            f"{min(samples):.3f} to {max(samples):.3f}"
        )
    others = ", ".join(f"{name} {ms:.3f}" for name, ms in list(regions.other_ms.items())[:5])
    lines += [
        f"op time     {regions.total_ms:.3f} ms of wall time a step, of {median(regions.wall_ms):.3f} ms traced; "
        f"{regions.runtime_ms:.3f} ms in the autograd engine and around compiled kernels",
        f"mapped      {regions.mapped_share:.2%} of op time, {regions.inferred_share:.2%} by neighbours; "
        f"{regions.spanning_share:.2%} in kernels that span regions, counted for that of most elements "
        f"(by elements, {regions.foreign_share:.2%} is another region's)"
        + (f"; without a region: {others}" if others else ""),
        "longest     " + ", ".join(f"{name} {ms:.3f}" for name, ms in list(regions.op_ms.items())[:5]),
    ]
    return lines


if __name__ == "__main__":
    jaxrec_flags.run_command(main, define_flags)
