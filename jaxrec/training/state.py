"""What a training step reads and writes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.embeddings.tables import Tables


class LossScale(NamedTuple):
    """Dynamic loss scaling. Without it the scale is 1 and nothing changes.

    Attributes:
      scale: float32, a power of two; what the loss is multiplied by, and the gradients are divided by.
      good_steps: int32, steps since it last changed.
      skipped: int32, steps whose gradients were not finite at their scale, and that changed nothing else.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array


class TrainState(NamedTuple):
    """A pure pytree, donated to every step.

    Attributes:
      step: int32, batches consumed: updates applied, and steps that loss scaling skipped.
      dense: The dense parameters (an `nnx.State` split from the model once).
      optimizer: The dense optimizer's state.
      tables: The embedding groups.
      loss_scale: See `LossScale`.
      failed_step: int32, the step that was refused, or -1. While it is not -1 every step is a no-op.
      failed_check: int32, index into `step.checks`.
      overflow: int32, distinct rows beyond the exchange capacities in the last step that was tried, on all devices.
    """

    step: jax.Array
    dense: Any
    optimizer: Any
    tables: Tables
    loss_scale: LossScale
    failed_step: jax.Array
    failed_check: jax.Array
    overflow: jax.Array


class Window(NamedTuple):
    """Sums over the steps since the host last read them, float32 scalars; mergeable by addition."""

    loss: jax.Array
    prediction: jax.Array
    label: jax.Array
    weight: jax.Array


def empty_window() -> Window:
    return Window(*(jnp.zeros((), jnp.float32) for _ in Window._fields))
