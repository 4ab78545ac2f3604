"""Row-wise Adagrad: one accumulator a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrec.optim.row_rule import Context, Rows, Update


def update(eps: float) -> Update:
    """Returns the update of EXACT_ROWWISE_ADAGRAD: a += mean(g^2) over the row, w -= lr * g / (sqrt(a) + eps).

    g is the row's gradient summed over all its occurrences in the global batch. Definition: FBGEMM, split table batched
    embeddings, `OptimType.EXACT_ROWWISE_ADAGRAD`.
    """

    def apply(gradient: jax.Array, slots: Rows, context: Context):
        accumulator = slots["accumulator"] + context.row_mean(gradient * gradient)
        denominator = jnp.sqrt(accumulator) + eps
        # With eps 0 an untouched row must stay, not become 0 / 0.
        scale = jnp.where(denominator > 0, context.learning_rate / denominator, 0.0)
        return -scale[:, None] * gradient, {"accumulator": accumulator}

    return apply
