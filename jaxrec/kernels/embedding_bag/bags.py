"""What an embedding bag is made of; shared by all implementations.

Shape suffixes, also of the other modules: B rows of the batch, S slots of a row, V vectors of a row, N = B * S
occurrences, R rows of the table, D columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

OPTIMIZERS = ("sgd", "momentum", "rowwise_adagrad", "adagrad", "adam")
# How the library numbers the types of tables; narrow floats are stored as their bits, uint16.
DTYPES = ("float32", "bfloat16", "float16", "int8")


@dataclasses.dataclass(frozen=True)
class Bags:
    """Which slots are summed into which vector; static.

    Attributes:
      runs: Slots of each of the V vectors, in the order of the slots.
      sentinel: The row that means none: it is not read, and never updated.
    """

    runs: tuple[int, ...]
    sentinel: int

    @property
    def slots(self) -> int:
        return sum(self.runs)

    @property
    def vectors(self) -> int:
        return len(self.runs)


@dataclasses.dataclass(frozen=True)
class Rule:
    """An optimizer of rows, as `jaxrec.optim.sparse` defines it by the same name; static.

    Attributes:
      optimizer: One of `OPTIMIZERS`.
      dtype: Of the weights, one of `DTYPES` but int8.
      eps: Of both Adagrads and Adam.
      b1: Adam's, and the decay of `momentum`.
      b2: Adam's.
    """

    optimizer: str
    dtype: str = "float32"
    eps: float = 0.0
    b1: float = 0.0
    b2: float = 0.0


class Arrays(NamedTuple):
    """What an update writes.

    Attributes:
      weights: [R, D]: float32, or the uint16 bits of narrower floats.
      slots: The optimizer's arrays, float32 [R] (rowwise_adagrad) or [R, D], in the order of its rule.
      largest: float32 [1 + slots]: at least the magnitude of every weight and of every slot's values.
    """

    weights: jax.Array
    slots: Sequence[jax.Array]
    largest: jax.Array


class Gradients(NamedTuple):
    """What an update reads.

    Attributes:
      vectors: float32 [B, V * D], the gradient of `lookup`'s result.
      rows: int32 [B, S].
      weights: float32 [B, S], as in `lookup`.
      mean_squares: float32 [N]: at a row's first occurrence the mean of its merged gradient's squares, where the row's
        columns are on several devices; before `Scalars.gradient_scale`.
      draws: uint32 [N]: at a row's first occurrence the hash that stochastic rounding mixes columns into; of narrow
        tables only.
    """

    vectors: jax.Array
    rows: jax.Array
    weights: jax.Array | None = None
    mean_squares: jax.Array | None = None
    draws: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Scalars:
    """What changes from step to step, float32 [].

    Attributes:
      gradient_scale: Multiplies every merged gradient.
      rate: The learning rate.
      decay: rate * weight_decay.
      adam_rate: rate / (1 - b1^t).
      adam_correction: 1 - b2^t.
      first_column: int32, which column of a row the first one here is.
    """

    gradient_scale: jax.Array | float = 1.0
    rate: jax.Array | float = 0.0
    decay: jax.Array | float = 0.0
    adam_rate: jax.Array | float = 0.0
    adam_correction: jax.Array | float = 1.0
    first_column: jax.Array | int = 0

    def packed(self, ok: jax.Array | bool) -> jax.Array:
        """Returns float32 [7], as the library reads them; `ok`: whether to write."""
        rates = (self.gradient_scale, self.rate, self.decay, self.adam_rate, self.adam_correction)
        values = (*rates, ok, self.first_column)
        return jnp.stack([jnp.asarray(v).astype(jnp.float32) for v in values])
