"""Which number type each part of a training step uses."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrec.checks import one_of

PRECISIONS = ("float32", "bfloat16")


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


def policy(name: str) -> Policy:
    """Returns the policy of `--precision=name`.

    Raises:
      UserError: `name` is not built.
    """
    one_of("--precision", name, PRECISIONS)
    return Policy(compute=jnp.dtype(name))
