"""The two sides of the comparison, each in a process of its own: the same questions, answered by JAX or by PyTorch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np

from experiments.baselines.stacks import OPTIMIZERS, builder, paired
from experiments.drawn import Drawn
from jaxrec.checks import require
from jaxrec.configs import catalogue, overrides
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Dataset
from jaxrec.flags import cache_dir
from jaxrec.precision import CPU_PRODUCTS
from jaxrec.training.config import Config
from jaxrec.training.metrics import EvaluationMetrics

# Batches that stay on the device for the steps without input, and threads that make batches for those with it.
RESIDENT_BATCHES, THREADS = 8, 2


@dataclasses.dataclass(frozen=True)
class Case:
    """What a process trains.

    Attributes:
      stack: `jax`, or one of the baselines'.
      config: Named config.
      optimizer: Of the embedding rows: the one that the peer is compared under.
      changes: Of the config, path -> value.
      device: As torch names it.
    """

    stack: str
    config: str
    optimizer: str
    changes: Mapping[str, Any]
    device: str = "cpu"

    def settled(self) -> Config:
        """Returns the config, its rows held in memory."""
        # Lists are tuples that came through JSON.
        changes = {path: tuple(v) if isinstance(v, list) else v for path, v in self.changes.items()}
        changes = {"embedding.optimizer.name": self.optimizer, **changes}
        config = overrides.replace_all(catalogue.get(self.config), changes)
        if self.stack != "jax":
            config = paired(config, self.stack)
        # The baselines have one task; nor has jaxrec others then.
        return dataclasses.replace(config, data=Drawn(config.data, auxiliary=False))


class Side(Protocol):
    """A model in training."""

    def compile(self) -> float:
        """Compiles what is not compiled yet, without a change of the weights; returns the seconds of compiling."""
        ...

    def settings(self) -> list[dict[str, Any]]:
        """Returns the settings among which the fastest is to be found, the first being the most usual."""
        ...

    def use(self, setting: Mapping[str, Any]) -> None:
        """Changes to a setting."""
        ...

    def resident(self, steps: int) -> float:
        """Returns the ms of a step on batches that are on the device already."""
        ...

    def fed(self, steps: int) -> float:
        """Returns the ms of a step whose batches come through the input pipeline, on `THREADS` threads."""
        ...

    def put(self, batches: int) -> float:
        """Returns the ms in which a batch is brought to the device, into the layout that the step takes."""
        ...

    def profile(self, folder: str, steps: int) -> dict[str, Any]:
        """Traces steps; returns the regions' wall time, and the path of the trace in `folder`."""
        ...

    def train(self, first: int, end: int) -> float:
        """Takes the steps first <= k < end of the training split's batches; returns their seconds, input included."""
        ...

    def evaluate(self) -> float:
        """Returns the NE of the validation split."""
        ...


@final
class JaxSide:
    """jaxrec's own training program."""

    _stepper: Any = None

    def __init__(self, case: Case, config: Config, dataset: Dataset):
        """Builds the training program.

        Raises:
          UserError: JAX has no such device.
        """
        import jax

        wanted = {"cpu": "cpu", "cuda": "gpu"}[case.device]
        found = jax.default_backend()
        require(found == wanted, f"--device is {case.device}, for which JAX must have a {wanted}, but it has a {found}")
        self._config, self._dataset = config, dataset
        self.use(self.settings()[0])

    def settings(self) -> list[dict[str, Any]]:
        import jax

        libraries = [self._config.cpu_products, *(p for p in CPU_PRODUCTS if p != self._config.cpu_products)]
        return [{"products": library} for library in (libraries if jax.default_backend() == "cpu" else libraries[:1])]

    def use(self, setting: Mapping[str, Any]) -> None:
        from jaxrec.profiling.step_profile import Stepper

        config = dataclasses.replace(self._config, cpu_products=setting["products"])
        if self._stepper is None or self._used != setting:
            self._stepper = None  # Freed before the next is allocated.
            self._stepper, self._used = Stepper(config, self._dataset), dict(setting)

    def compile(self) -> float:
        assert self._stepper is not None
        return self._stepper.compile_seconds  # Ahead of time, where it was built.

    def resident(self, steps: int) -> float:
        return self._stepper.resident(steps)

    def fed(self, steps: int) -> float:
        return self._stepper.fed(steps, THREADS)

    def train(self, first: int, end: int) -> float:
        return self._stepper.train(first, end, THREADS)

    def put(self, batches: int) -> float:
        return self._stepper.put(batches)

    def evaluate(self) -> float:
        from jaxrec.training.evaluation import Evaluator

        evaluator = Evaluator(self._config, self._dataset, self._stepper.program, self._stepper.state)
        values = evaluator.run(self._stepper.state, "validation")
        assert values is not None
        return values["ne"]

    def profile(self, folder: str, steps: int) -> dict[str, Any]:
        from jaxrec.profiling import program, roofline

        module, regions, trace = self._stepper.regions(folder, steps)
        ceilings = self._stepper.ceilings(3)
        bounds = roofline.bounds(module, regions, ceilings)
        facts = program.describe(self._stepper.compiled, module, self._stepper.model_flops())
        scale = roofline.wall_of_thread_time(regions)
        return {
            "wall_ms": {
                name: {"forward": [scale * x for x in t.forward], "backward": [scale * x for x in t.backward]}
                for name, t in regions.mean().items()
            },
            "bounds": {name: bound.as_dict() for name, bound in bounds.items()},
            "mapped": regions.mapped_share, "spanning": regions.spanning_share, "places": dict(regions.op_place),
            "ceilings": dataclasses.asdict(ceilings), "model_flops": facts.model_flops,
            "compiler_flops": facts.compiler_flops, "memory": facts.memory,
            "trace": str(Path(trace) / "perfetto_trace.json.gz"),
        }  # fmt: skip


class _Fresh(Mapping[str, np.ndarray]):
    """First weights, tables made one by one when they are asked for: a timed run needs no given ones."""

    def __init__(self, config: Config, dataset: Dataset):
        from experiments.baselines.jax_stack import initial_arrays

        schema = dataset.schema
        one_row = dataclasses.replace(schema, vocabulary=dict.fromkeys(schema.vocabulary, 1))
        self._others = initial_arrays(config, dataclasses.replace(dataset, schema=one_row))
        self._rows, self._embedding = schema.vocabulary, config.embedding

    def __getitem__(self, name: str) -> np.ndarray:
        if not name.startswith("tables/"):
            return self._others[name]
        _, table, what = name.split("/")
        shape = (self._rows[table], *self._others[name].shape[1:])
        if what == "weights":
            draws = np.random.default_rng(0).random(shape, np.float32)
            return (2 * draws - 1) * np.float32(self._embedding.init_scale or shape[0] ** -0.5)
        return np.full(shape, self._embedding.optimizer.initial_accumulator, np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


@final
class TorchSide:
    """A PyTorch stack."""

    def __init__(self, case: Case, config: Config, dataset: Dataset, *, given: bool):
        """Builds the stack.

        Args:
          case: Its stack and device.
          config: What it trains.
          dataset: On what.
          given: Whether it begins with jaxrec's first weights, table by table; else with others like them.
        """
        from experiments.baselines.jax_stack import initial_arrays

        self._case, self._config, self._dataset = case, config, dataset
        self._batches = Batches(dataset, "train", config.training.batch_size, seed=config.training.seed)
        self._arrays = initial_arrays(config, dataset) if given else _Fresh(config, dataset)
        self._layout = ""
        self.use(self.settings()[0])

    def settings(self) -> list[dict[str, Any]]:
        import torch

        usual = {"threads": torch.get_num_threads(), "ids": "int64", "layout": "separate"}
        tried = [usual, {**usual, "threads": max(1, usual["threads"] // 2)}, {**usual, "ids": "int32"}]
        # One bag for all tables takes full bags of one length, which these data sets say of themselves.
        full = getattr(getattr(self._config.data, "data", None), "fixed_bags", False)
        if OPTIMIZERS[self._case.stack] == "adagrad" and full:
            tried += [{**usual, "layout": "joined"}, {**usual, "layout": "joined", "ids": "int32"}]
        return tried

    def use(self, setting: Mapping[str, Any]) -> None:
        import torch

        torch.set_num_threads(setting["threads"])
        if (layout := f"{setting['layout']} {setting['ids']}") != self._layout:
            self._stack = self._inputs = None  # Freed before the next is allocated.
            build = builder(self._case.stack, self._case.device, setting["ids"], setting["layout"])
            self._stack, self._layout = build(self._config, self._dataset, self._arrays), layout
            count = min(RESIDENT_BATCHES, len(self._batches))
            self._inputs = [self._stack.put(self._batches[k].batch) for k in range(count)]

    def compile(self) -> float:
        assert self._stack is not None and self._inputs is not None
        begin = time.perf_counter()
        self._stack.dense_gradients(self._inputs[0])  # What compiles does so at the first call of both passes.
        return time.perf_counter() - begin

    def resident(self, steps: int) -> float:
        assert self._inputs is not None
        turn = iter(range(steps))
        return self._take(steps, lambda: self._inputs[next(turn) % len(self._inputs)])  # pyright: ignore[reportOptionalSubscript, reportOptionalMemberAccess, reportArgumentType]

    def fed(self, steps: int) -> float:
        assert self._stack is not None
        held = THREADS + 2  # As `Stepper.fed`.
        source = stream(self._batches, 0, steps + held, threads=THREADS, prefetch=THREADS)
        with DevicePrefetch(source, self._stack.put, depth=1) as ahead:
            self._take(held, lambda: next(ahead)[0])
            return self._take(steps, lambda: next(ahead)[0])

    def train(self, first: int, end: int) -> float:
        assert self._stack is not None
        begin = time.perf_counter()
        with DevicePrefetch(stream(self._batches, first, end, threads=THREADS), self._stack.put) as ahead:
            self._take(end - first, lambda: next(ahead)[0])
        return time.perf_counter() - begin

    def put(self, batches: int) -> float:
        assert self._stack is not None
        hosts = [self._batches[k].batch for k in range(min(batches, len(self._batches)))]
        begin = time.perf_counter()
        for k in range(batches):
            self._stack.put(hosts[k % len(hosts)])
        self._stack.wait()
        return (time.perf_counter() - begin) / batches * 1e3

    def _take(self, steps: int, inputs: Callable[[], Any]) -> float:
        assert self._stack is not None
        begin = time.perf_counter()
        for _ in range(steps):
            self._stack.step(inputs())
        self._stack.wait()
        return (time.perf_counter() - begin) / steps * 1e3

    def evaluate(self) -> float:
        assert self._stack is not None
        batches = Batches(self._dataset, "validation", self._config.training.batch_size, shuffle=False)
        with EvaluationMetrics() as metrics:
            for k in range(len(batches)):
                host = batches[k]
                logits = self._stack.logits(self._stack.put(host.batch))
                metrics.update(logits, host.batch.labels[:, 0], host.batch.weight, host.group)
            return metrics.compute()["ne"]

    def profile(self, folder: str, steps: int) -> dict[str, Any]:
        from experiments.baselines.torch_regions import profile
        from experiments.baselines.torch_stack import TorchStack

        assert isinstance(self._stack, TorchStack) and self._inputs is not None
        regions, trace = profile(self._stack, self._inputs, steps, Path(folder))
        return {
            "wall_ms": {
                name: {"forward": list(t.forward), "backward": list(t.backward)} for name, t in regions.mean().items()
            },
            "mapped": regions.mapped_share, "spanning": regions.spanning_share,
            "places": {}, "trace": str(trace.relative_to(folder)),
        }  # fmt: skip


def side(case: Case, *, given: bool) -> Side:
    """Builds a case's side; `given` as for `TorchSide`."""
    config = case.settled()
    dataset = config.data.open(cache_dir("data"))
    if case.stack == "jax":
        return JaxSide(case, config, dataset)
    return TorchSide(case, config, dataset, given=given)
