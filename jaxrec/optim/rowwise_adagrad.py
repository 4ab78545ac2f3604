"""Row-wise Adagrad: one accumulator a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def update(
    eps: float,
) -> Callable[[jax.Array, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns the update of EXACT_ROWWISE_ADAGRAD: a += mean(g^2) over the row, w -= lr * g / (sqrt(a) + eps).

    g is the row's gradient summed over all its occurrences in the global batch. Definition: FBGEMM, split table batched
    embeddings, `OptimType.EXACT_ROWWISE_ADAGRAD`.
    """

    def apply(gradient: jax.Array, slots: Mapping[str, jax.Array], learning_rate: jax.Array):
        accumulator = slots["accumulator"] + jnp.mean(gradient * gradient, axis=-1)
        denominator = jnp.sqrt(accumulator) + eps
        # With eps 0 an untouched row must stay, not become 0 / 0.
        scale = jnp.where(denominator > 0, learning_rate / denominator, 0.0)
        return -scale[:, None] * gradient, {"accumulator": accumulator}

    return apply
