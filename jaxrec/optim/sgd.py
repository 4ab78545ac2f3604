"""Stochastic gradient descent on rows, plain and with momentum."""

from __future__ import annotations

import jax

from jaxrec.optim.row_rule import Context, Rows, Update


def update_rows(gradient: jax.Array, slots: Rows, context: Context) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns w -= lr * g; there are no slots."""
    del slots
    return -context.learning_rate * gradient, {}


def update_rows_with_momentum(momentum: float) -> Update:
    """Returns m = momentum * m + g, w -= lr * m, for the touched rows only: the others' m stays, and does not decay.

    Definition: torch.optim.SGD(momentum), on rows that have a gradient.
    """

    def apply(gradient: jax.Array, slots: Rows, context: Context):
        velocity = momentum * slots["momentum"] + gradient
        return -context.learning_rate * velocity, {"momentum": velocity}

    return apply
