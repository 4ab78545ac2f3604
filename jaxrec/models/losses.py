"""Losses on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def binary_cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns -[y log s(z) + (1 - y) log(1 - s(z))] = max(z, 0) - z y + log(1 + exp(-|z|)), elementwise in float32.

    Args:
      logits: float32, any shape.
      labels: 0 or 1, the same shape.
    """
    return jnp.maximum(logits, 0) - logits * labels + jnp.log1p(jnp.exp(-jnp.abs(logits)))
