"""Element-wise Adagrad as PyTorch defines it, for embedding rows and for dense parameters.

optax's adagrad differs (eps inside the root, accumulator starting at 0.1), hence the transformation here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrec.optim.row_rule import Context, Rows, Update


def _direction(gradient: jax.Array, accumulator: jax.Array, eps: float) -> jax.Array:
    denominator = jnp.sqrt(accumulator) + eps
    # With eps 0 an untouched element must stay, not become 0 / 0.
    return jnp.where(denominator > 0, gradient / denominator, 0.0)


def update_rows(eps: float) -> Update:
    """Returns the row update a += g^2, w -= lr * g / (sqrt(a) + eps), element by element."""

    def apply(gradient: jax.Array, slots: Rows, context: Context):
        accumulator = slots["accumulator"] + gradient * gradient
        return -context.learning_rate * _direction(gradient, accumulator, eps), {"accumulator": accumulator}

    return apply


class AdagradState(NamedTuple):
    accumulator: optax.Params


def scale_by_adagrad(eps: float, initial_accumulator: float) -> optax.GradientTransformation:
    """Returns g -> g / (sqrt(a) + eps) with a += g^2, for dense parameters.

    Source: torch.optim.Adagrad.
    """

    def init(params: optax.Params) -> AdagradState:
        return AdagradState(jax.tree.map(lambda p: jnp.full_like(p, initial_accumulator), params))

    def update(updates: optax.Updates, state: AdagradState, params: optax.Params | None = None):
        del params
        accumulator = jax.tree.map(lambda g, a: a + g * g, updates, state.accumulator)
        return jax.tree.map(lambda g, a: _direction(g, a, eps), updates, accumulator), AdagradState(accumulator)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
