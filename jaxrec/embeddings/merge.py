"""Merging duplicate rows, exactly and without a sort.

Shape suffixes: N occurrences, D dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

IN_BOUNDS = "promise_in_bounds"


class Merged(NamedTuple):
    """One gradient per distinct row.

    Attributes:
      first: bool [N], true at the one occurrence that represents its row.
      gradient: [N, D], at representatives the sum over all occurrences of the row; zeros elsewhere.
      scratch: int32 [rows], to be passed to the next call; its values mean nothing between calls.
    """

    first: jax.Array
    gradient: jax.Array
    scratch: jax.Array


def merge(rows: jax.Array, gradients: jax.Array, scratch: jax.Array) -> Merged:
    """Sums the gradients of equal rows.

    Every occurrence writes its position to its row's scratch cell and reads it back: all occurrences of a row then read
    the position of the one that wrote last, and add their gradients there. The cells need no reset, because only cells
    written in the same call are read.

    Args:
      rows: int32 [N], in bounds of `scratch`.
      gradients: float32 [N, D].
      scratch: int32, one cell a row; donated through the step, so that no table-sized temporary exists.
    """
    positions = jnp.arange(rows.shape[0], dtype=jnp.int32)
    scratch = scratch.at[rows].set(positions, mode=IN_BOUNDS)
    representative = scratch.at[rows].get(mode=IN_BOUNDS)
    gradient = jnp.zeros_like(gradients).at[representative].add(gradients, mode=IN_BOUNDS)
    return Merged(representative == positions, gradient, scratch)
