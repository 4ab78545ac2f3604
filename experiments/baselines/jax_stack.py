"""jaxrec's training step behind the stacks' interface: the other side of every comparison."""

from __future__ import annotations

import functools
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.baselines.stacks import Arrays
from jaxrec.data.schema import Batch, Dataset
from jaxrec.embeddings import tables as tables_lib
from jaxrec.models.losses import binary_cross_entropy
from jaxrec.training import setup
from jaxrec.training.checkpoint import from_arrays, to_arrays
from jaxrec.training.config import Config
from jaxrec.training.state import TrainState
from jaxrec.training.step import Program, shard_predict_step, shard_train_step


def initial_arrays(config: Config, dataset: Dataset) -> dict[str, np.ndarray]:
    """Returns the weights and optimizer rows with which jaxrec begins to train."""
    program, dense = setup.build_program(config, dataset)
    return to_arrays(program, setup.initial_state(program, dense))


@final
class JaxStack:
    """See `stacks.Stack`."""

    def __init__(self, config: Config, dataset: Dataset, arrays: Arrays):
        self._program, dense = setup.build_program(config, dataset)
        first = setup.initial_state(self._program, dense)
        self._state = from_arrays(self._program, first, dict(arrays), "the given weights")
        # A program of its own: what its compiler is told holds at the top level only.
        self._step = shard_train_step(self._program)
        self._predict = shard_predict_step(self._program)
        self._gradients = jax.jit(functools.partial(_dense_gradients, self._program))
        self._put = setup.put_batch(self._program)

    def put(self, batch: Batch) -> Batch:
        return self._put(batch)

    def step(self, inputs: Batch) -> jax.Array:
        self._state, window, _ = self._step(self._state, setup.new_window(self._program), inputs)
        return window.loss / window.weight

    def logits(self, inputs: Batch) -> np.ndarray:
        return np.asarray(self._predict(self._state.dense, self._state.tables, inputs))[:, 0]

    def dense_gradients(self, inputs: Batch) -> dict[str, np.ndarray]:
        # A state whose dense parameters are their gradients: its arrays have the names.
        gradients = self._gradients(self._state, inputs)
        named = to_arrays(self._program, self._state._replace(dense=gradients))
        return {name: array for name, array in named.items() if name.startswith("dense/")}

    def export(self) -> dict[str, np.ndarray]:
        return to_arrays(self._program, self._state)

    def wait(self) -> None:
        jax.block_until_ready(self._state)


def _dense_gradients(program: Program, state: TrainState, batch: Batch) -> Any:
    """Returns the gradients of the mean loss, as `step.train_step` takes them on one device."""
    activations, _ = tables_lib.look_up(program.plan, state.tables, batch.ids, batch.lengths, program.axis_sizes)

    def loss_sum(dense: Any) -> jax.Array:
        logits = nnx.merge(program.graphdef, dense)(batch.dense, activations, None)
        return jnp.sum(batch.weight * binary_cross_entropy(logits, batch.labels)[:, 0])

    return jax.tree.map(lambda g: g / jnp.sum(batch.weight), jax.grad(loss_sum)(state.dense))
