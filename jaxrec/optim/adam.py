"""Row-lazy Adam: the moments of a row change in steps that touch it, and only then."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrec.optim.row_rule import Context, Rows, Update


def update_rows(b1: float, b2: float, eps: float) -> Update:
    """Returns m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, w -= lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    t counts the run's steps, not the row's. Definition: torch.optim.SparseAdam.
    """

    def apply(gradient: jax.Array, slots: Rows, context: Context):
        t = (context.step + 1).astype(jnp.float32)
        first = b1 * slots["first"] + (1 - b1) * gradient
        second = b2 * slots["second"] + (1 - b2) * gradient * gradient
        # 1 - b^t by expm1: for b near 1 and few steps, the difference would lose most of its digits.
        corrected = jnp.sqrt(second / -jnp.expm1(t * jnp.log(b2))) + eps
        rate = context.learning_rate / -jnp.expm1(t * jnp.log(b1))
        # With eps 0 an element without any gradient so far must stay, not become 0 / 0.
        direction = jnp.where(corrected > 0, first / corrected, 0.0)
        return -rate * direction, {"first": first, "second": second}

    return apply
