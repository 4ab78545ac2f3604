"""The profile of a training step: untraced times, a trace, and everything that is read from trace and program."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import stream
from jaxrec.data.schema import Dataset
from jaxrec.models.dlrm import DLRM
from jaxrec.profiling import hardware, op_events, program, roofline, verdict
from jaxrec.profiling.hlo import Module
from jaxrec.profiling.model_flops import step_flops
from jaxrec.profiling.regions import Regions, join
from jaxrec.tracing import StepTracer
from jaxrec.training import setup
from jaxrec.training.config import Config
from jaxrec.training.loop import IN_FLIGHT
from jaxrec.training.step import shard_train_step

# Batches that stay on the device for the steps without input.
RESIDENT_BATCHES = 8
WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """A step, profiled.

    Attributes:
      resident_ms: Untraced times of a step on batches that are on the device, one for each sample.
      fed_ms: Untraced times of a step that takes its batch from the input pipeline, in alternation with the former.
      steps_a_sample: How many steps one of those times is the mean of.
      traced: How many steps the regions are of.
      trace: The trace's folder, relative to the workdir.
    """

    regions: Regions
    program: program.ProgramFacts
    ceilings: hardware.Ceilings
    bounds: dict[str, roofline.RegionBound]
    split: roofline.Split
    verdict: verdict.Verdict
    resident_ms: list[float]
    fed_ms: list[float]
    steps_a_sample: int
    traced: int
    trace: str

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        regions = dataclasses.asdict(self.regions)
        times = {
            str(device): {name: dataclasses.asdict(time) for name, time in of_device.items()}
            for device, of_device in self.regions.devices.items()
        }
        return {
            "verdict": {**dataclasses.asdict(self.verdict), "sentence": self.verdict.sentence()},
            "regions": {**regions, "devices": times, "mapped_share": self.regions.mapped_share},
            "bounds": {name: bound.as_dict() for name, bound in self.bounds.items()},
            "split": dataclasses.asdict(self.split),
            "program": self.program.as_dict(),
            "ceilings": dataclasses.asdict(self.ceilings),
            "resident_ms": self.resident_ms,
            "fed_ms": self.fed_ms,
            "steps_a_sample": self.steps_a_sample,
            "traced": self.traced,
            "trace": self.trace,
        }


def measure(
    config: Config,
    dataset: Dataset,
    workdir: str,
    *,
    samples: int = 5,
    seconds: float = 1.0,
    traced: int = 5,
    threads: int = 2,
) -> StepProfile:
    """Profiles the training step of a config; the trace goes into the workdir.

    Args:
      config: The run's.
      dataset: Its data.
      workdir: Where the trace goes, for TensorBoard and Perfetto.
      samples: Untraced times, with and without input each.
      seconds: Of such a time, at least.
      traced: Steps that are traced, after one more that is left out.
      threads: Of the input.
    """
    stepper = Stepper(config, dataset)
    stepper.resident(WARM_UP)
    warm_ms = stepper.resident(WARM_UP)
    steps = max(WARM_UP, math.ceil(1e3 * seconds / warm_ms))
    resident_ms, fed_ms = [], []
    for _ in range(samples):
        resident_ms.append(stepper.resident(steps))
        fed_ms.append(stepper.fed(steps, threads))
    module, regions, trace = stepper.regions(workdir, traced)
    facts = program.describe(stepper.compiled, module, stepper.model_flops())
    ceilings = stepper.ceilings(samples)
    split = roofline.split(module, regions, ceilings)
    return StepProfile(
        regions=regions,
        program=facts,
        ceilings=ceilings,
        bounds=roofline.bounds(module, regions, ceilings),
        split=split,
        verdict=verdict.decide(fed_ms, resident_ms, split),
        resident_ms=resident_ms,
        fed_ms=fed_ms,
        steps_a_sample=steps,
        traced=len(regions.wall_ms) // len(regions.devices),
        trace=trace,
    )


class Stepper:
    """Takes steps of a config, and keeps their state.

    Attributes:
      compiled: The training step, compiled ahead of time.
      compile_seconds: How long tracing, lowering and compiling it took.
    """

    def __init__(self, config: Config, dataset: Dataset):
        self._config = config
        self._batches = setup.training_batches(config, dataset)
        self.program, self._dense = setup.build_program(config, dataset, self._batches)
        self.state, self.window = setup.initial_state(self.program, self._dense), setup.new_window(self.program)
        shapes = setup.batch_shapes(dataset, config.training.batch_size, self.program)
        begin = time.perf_counter()
        self.compiled = shard_train_step(self.program).lower(self.state, self.window, shapes).compile()
        self.compile_seconds = time.perf_counter() - begin
        self._put = setup.put_batch(self.program)
        count = min(RESIDENT_BATCHES, len(self._batches))
        self._resident = [self._put(self._batches[k].batch) for k in range(count)]

    def model_flops(self) -> float:
        """Returns the FLOPs of a device's step by the model's definition; 0 where that is not known."""
        model, config = nnx.merge(self.program.graphdef, self._dense), self._config
        if not isinstance(model, DLRM):
            return 0.0
        return step_flops(model, config.embedding.dim, config.training.batch_size // config.mesh.size)

    def ceilings(self, samples: int) -> hardware.Ceilings:
        """Measures the device's ceilings for the rows and the products of this step."""
        row_bytes = self._config.embedding.dim * np.dtype(self._config.policy.table).itemsize
        table_bytes = max(t.weights.addressable_shards[0].data.nbytes for t in self.state.tables.values())
        return hardware.measure(self._config.policy, row_bytes, table_bytes, samples=samples)

    def regions(self, workdir: str, traced: int) -> tuple[Module, Regions, str]:
        """Traces steps, after one that is left out; returns the program, its regions and the trace's folder."""
        trace = self.trace(workdir, traced + 1)
        module = Module(self.compiled.as_text() or "")
        times = op_events.op_times(op_events.read(Path(workdir) / trace), module.name)
        return module, join(module, times, skip=1), trace

    def resident(self, steps: int) -> float:
        """Returns the ms of a step on batches that are on the device already."""
        turn = iter(range(steps))
        return self._take(steps, lambda: self._resident[next(turn) % len(self._resident)])

    def fed(self, steps: int, threads: int) -> float:
        """Returns the ms of a step whose batches come through the input pipeline."""
        # What the pipeline can hold (a batch in each thread, one on the device, one in between) is taken before the
        # clock starts, lest a short sample should see no wait.
        held = threads + 2
        source = stream(self._batches, 0, steps + held, threads=threads, prefetch=threads)
        with DevicePrefetch(source, self._put, depth=1) as ahead:
            self._take(held, lambda: next(ahead)[0])
            return self._take(steps, lambda: next(ahead)[0])

    def train(self, first: int, end: int, threads: int) -> float:
        """Takes the steps first <= k < end with the batches of those numbers; returns their seconds, input included."""
        begin = time.perf_counter()
        with DevicePrefetch(stream(self._batches, first, end, threads=threads), self._put) as ahead:
            self._take(end - first, lambda: next(ahead)[0])
        return time.perf_counter() - begin

    def put(self, batches: int) -> float:
        """Returns the ms in which a host batch is brought to the device."""
        hosts = [self._batches[k].batch for k in range(min(batches, len(self._batches)))]
        begin = time.perf_counter()
        for k in range(batches):
            jax.block_until_ready(self._put(hosts[k % len(hosts)]))
        return (time.perf_counter() - begin) / batches * 1e3

    def trace(self, workdir: str, steps: int) -> str:
        """Traces steps, one after the other; returns the trace's folder, relative to the workdir."""
        folder = ""
        with StepTracer(workdir, (0, steps)) as tracer:
            for k in range(steps):
                tracer.before(k)
                with tracer.mark(k):
                    self._take(1, lambda k=k: self._resident[k % len(self._resident)])
                folder = tracer.after(k, self.state) or folder
        return folder

    def _take(self, steps: int, batch: Callable[[], Any]) -> float:
        """Takes steps as training does, the host at most `IN_FLIGHT` ahead; returns the ms of one."""
        in_flight: collections.deque[jax.Array] = collections.deque()
        begin = time.perf_counter()
        for _ in range(steps):
            self.state, self.window, done = self.compiled(self.state, self.window, batch())
            in_flight.append(done)
            if len(in_flight) > IN_FLIGHT:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready(self.state)
        return (time.perf_counter() - begin) / steps * 1e3
