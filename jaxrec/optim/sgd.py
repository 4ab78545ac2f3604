"""Stochastic gradient descent on rows."""

from __future__ import annotations

from collections.abc import Mapping

import jax


def update_rows(
    gradient: jax.Array, slots: Mapping[str, jax.Array], learning_rate: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns w -= lr * g; there are no slots."""
    del slots
    return -learning_rate * gradient, {}
