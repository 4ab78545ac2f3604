"""Which number type each part of a training step uses."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrec.checks import one_of

PRECISIONS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The types of one `--precision` value.

    Attributes:
      compute: Operands of the dense part's matrix products and activations.
      accumulate: What matrix products accumulate in and return.
      param: Dense parameters, embedding tables, optimizer state, losses and metrics.
    """

    compute: DTypeLike
    accumulate: DTypeLike = jnp.float32
    param: DTypeLike = jnp.float32

    @property
    def loss_scaled(self) -> bool:
        """Whether gradients need a larger loss lest they vanish: float16 has 5 bits of exponent."""
        return jnp.dtype(self.compute) == jnp.float16

    def describe(self) -> str:
        """Returns the types in words, for the run's log."""
        names = [jnp.dtype(t).name for t in (self.compute, self.accumulate, self.param)]
        scaled = ", dynamic loss scaling" if self.loss_scaled else ""
        return (
            f"dense part computes in {names[0]}, accumulates in {names[1]}; parameters, tables, optimizers, losses and "
            f"metrics are {names[2]}{scaled}"
        )


def policy(name: str) -> Policy:
    """Returns the policy of `--precision=name`.

    Raises:
      UserError: `name` is not built.
    """
    one_of("--precision", name, PRECISIONS)
    return Policy(compute=jnp.dtype(name))
