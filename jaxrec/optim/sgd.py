"""Stochastic gradient descent on rows."""

from __future__ import annotations

import jax

from jaxrec.optim.row_rule import RowMean, Rows


def update_rows(
    gradient: jax.Array, slots: Rows, learning_rate: jax.Array, row_mean: RowMean
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns w -= lr * g; there are no slots."""
    del slots, row_mean
    return -learning_rate * gradient, {}
