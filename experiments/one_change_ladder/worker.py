"""A rung in a process of its own, for options that act on a whole process: it trains as its parent tells it to.

    python -m experiments.one_change_ladder.worker ARGUMENT

ARGUMENT is JSON: `platform`, JAX's name of the devices; `rung`; `file`, which `run.py` has pickled: a config and the
rows. It can be asked to `train` some steps, and to `evaluate`; see `experiments.workers`.
"""

from __future__ import annotations

import collections
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.one_change_ladder.rungs import Rung, by_name
from experiments.workers import serve
from jaxrec import startup
from jaxrec.configs import overrides
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Batch, Dataset
from jaxrec.precision import compiler_options
from jaxrec.training.config import Config
from jaxrec.training.metrics import EvaluationMetrics

# Steps that the host may be ahead of the device, as in jaxrec.training.loop.
AHEAD = 2


class Trainer:
    """Trains a rung, some steps at a time."""

    def __init__(self, rung: Rung, config: Config, dataset: Dataset):
        size = config.training.batch_size
        self._rung = rung
        self._train = Batches(dataset, "train", size, seed=config.training.seed)
        self._held_out = Batches(dataset, "validation", size, shuffle=False)
        self._program = rung.program(config, dataset)
        self._state = _rounded(self._program.first(), rung.rounded) if rung.rounded else self._program.first()
        self._taken, self.losses = 0, []
        batch = self._program.put(self._train[0].batch)
        begin = time.perf_counter()
        step = jax.jit(self._program.step, donate_argnums=(0,) if rung.donated else ())
        self._step = step.lower(self._state, batch).compile(compiler_options={**compiler_options(rung.products)})
        self.compile_seconds = time.perf_counter() - begin

    def train(self, steps: int) -> None:
        """Takes the next steps, the making of their batches included; returns when the device has done all of it."""
        in_flight: collections.deque[jax.Array] = collections.deque()
        for batch in self._batches(steps):
            self._state, loss = self._step(self._state, batch)
            if not self._rung.ahead:
                jax.block_until_ready(self._state)
            in_flight.append(loss)
            while len(in_flight) > (AHEAD if self._rung.ahead else 0):
                self.losses.append(float(in_flight.popleft()))
        self.losses += [float(loss) for loss in in_flight]
        jax.block_until_ready(self._state)
        self._taken += steps

    def _batches(self, steps: int) -> Iterator[Batch]:
        first, end, put = self._taken, self._taken + steps, self._program.put
        if not self._rung.threads:
            yield from (jax.block_until_ready(put(self._train[k].batch)) for k in range(first, end))
            return
        with DevicePrefetch(stream(self._train, first, end, threads=self._rung.threads), put) as ahead:
            for batch, _ in ahead:
                yield batch

    def normalised_entropy(self) -> float:
        """Returns the NE of the held-out rows."""
        logits = jax.jit(self._program.logits)
        with EvaluationMetrics() as metrics:
            for host in self._held_out:
                found = np.asarray(logits(self._state, self._program.put(host.batch)))
                metrics.update(found, host.batch.labels[:, 0], host.batch.weight, host.group)
            return metrics.compute()["ne"]

    def step_bytes(self) -> int:
        """Returns what a step holds: its arguments, its results unless they take an argument's place, temporaries."""
        memory = self._step.memory_analysis()
        assert memory is not None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def _rounded(state: Any, seed: int) -> Any:
    """Returns jaxrec's state with each dense weight moved to a neighbouring number."""
    draws = np.random.default_rng(seed)

    def move(weights: jax.Array) -> jax.Array:
        up = jnp.asarray(draws.random(weights.shape) < 0.5)
        return jnp.nextafter(weights, jnp.where(up, jnp.inf, -jnp.inf))

    return state._replace(dense=jax.tree.map(move, state.dense))


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Builds the rung's program; returns what compiling took and a step holds, and what it can be asked."""
    rung = by_name(argument["rung"], argument["platform"])
    if rung.keeps_memory:
        startup.keep_freed_memory()
    config, schema, columns = pickle.loads(Path(argument["file"]).read_bytes())
    config = overrides.replace_all(config, rung.config)
    dataset = Dataset("synthetic", schema, {split: ArrayBlocks(of_split) for split, of_split in columns.items()})
    trainer = Trainer(rung, config, dataset)

    def train(steps: int) -> dict[str, Any]:
        before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        trainer.train(steps)
        seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
        return {"step": seconds, "user": user, "system": system, "losses": trainer.losses[-steps:]}

    started = {"compile_seconds": trainer.compile_seconds, "step_bytes": trainer.step_bytes()}
    return started, {"train": train, "evaluate": lambda: {"ne": trainer.normalised_entropy()}}


if __name__ == "__main__":
    serve(start)
