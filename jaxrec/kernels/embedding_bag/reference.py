"""What the operations return, in plain jnp: the oracle of the tests. Allocates tables at will."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec import counters
from jaxrec.kernels.embedding_bag.bags import Arrays, Bags, Gradients, Rule, Scalars
from jaxrec.rounding import stochastic


def _numbers(table: jax.Array, dtype: str, scales: jax.Array | None = None) -> jax.Array:
    if dtype == "int8":
        assert scales is not None
        return table.astype(jnp.float32) * scales[:, None]
    return jax.lax.bitcast_convert_type(table, jnp.dtype(dtype)).astype(jnp.float32)


def _weights(bags: Bags, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    given = jnp.ones(rows.shape, jnp.float32) if weights is None else weights
    return jnp.where(rows == bags.sentinel, 0.0, given)


def _vector_of_slot(bags: Bags) -> np.ndarray:
    return np.repeat(np.arange(bags.vectors), bags.runs)


def lookup(
    bags: Bags,
    table: jax.Array,
    dtype: str,
    rows: jax.Array,
    weights: jax.Array | None = None,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Returns float32 [B, V * D]: for each vector the sum of its slots' rows, each times its weight.

    Args:
      bags: Which slots belong to which vector.
      table: [R, D]: float32, the uint16 bits of narrower floats, or int8.
      dtype: One of `bags.DTYPES`.
      rows: int32 [B, S], in [0, R), or the sentinel.
      weights: float32 [B, S]; none: all are 1.
      scales: float32 [R], what a row of int8 is multiplied by.
    """
    safe = jnp.where(rows == bags.sentinel, 0, rows)
    vectors = _numbers(table, dtype, scales)[safe] * _weights(bags, rows, weights)[..., None]  # [B, S, D]
    out = jnp.zeros((rows.shape[0], bags.vectors, table.shape[1])).at[:, _vector_of_slot(bags)].add(vectors)
    return out.reshape(rows.shape[0], -1)


def add_up(bags: Bags, gradient: jax.Array, size: int, rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Returns float32 [size, D], the transpose of `lookup`: each row's sum over all its occurrences; 0 for others.

    Args:
      bags: As in `lookup`.
      gradient: float32 [B, V * D].
      size: R.
      rows: int32 [B, S].
      weights: As in `lookup`.
    """
    of_vector = gradient.reshape(rows.shape[0], bags.vectors, -1)
    of_slot = of_vector[:, _vector_of_slot(bags)] * _weights(bags, rows, weights)[..., None]  # [B, S, D]
    total = jnp.zeros((size + 1, of_slot.shape[-1]))
    safe = jnp.where(rows == bags.sentinel, size, rows)
    return total.at[safe.reshape(-1)].add(of_slot.reshape(rows.size, -1))[:size]


def _first(bags: Bags, rows: jax.Array, size: int) -> jax.Array:
    """Returns bool [N]: whether an occurrence is its row's first, in the order of positions."""
    flat = rows.reshape(-1)
    position = jnp.arange(flat.size)
    first = jnp.full(size + 1, flat.size).at[jnp.where(flat == bags.sentinel, size, flat)].min(position)
    return (flat != bags.sentinel) & (first[jnp.where(flat == bags.sentinel, size, flat)] == position)


def row_squares(
    bags: Bags, gradient: jax.Array, size: int, rows: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Returns float32 [N]: at each row's first occurrence the sum of its merged gradient's squares; 0 elsewhere.

    Args: As in `add_up`.
    """
    squares = jnp.sum(jnp.square(add_up(bags, gradient, size, rows, weights)), axis=1)
    flat = jnp.where(rows.reshape(-1) == bags.sentinel, 0, rows.reshape(-1))
    return jnp.where(_first(bags, rows, size), squares[flat], 0.0)


def _updated(
    bags: Bags, rule: Rule, arrays: Arrays, gradients: Gradients, scalars: Scalars
) -> tuple[jax.Array, jax.Array, list[jax.Array], jax.Array]:
    """Returns (touched [R], new weights [R, D] in float32, new slots, what is added to the weights)."""
    slots, rows, size = arrays.slots, gradients.rows, len(arrays.weights)
    g = add_up(bags, gradients.vectors, size, rows, gradients.weights) * scalars.gradient_scale
    touched = jnp.zeros(size + 1, bool).at[jnp.where(rows == bags.sentinel, size, rows).reshape(-1)].set(True)[:size]

    def of_row(per_occurrence: jax.Array) -> jax.Array:
        to = jnp.where(_first(bags, rows, size), rows.reshape(-1), size)
        return jnp.zeros(size + 1, per_occurrence.dtype).at[to].set(per_occurrence)[:size]

    def quotient(x: jax.Array, denominator: jax.Array) -> jax.Array:
        return jnp.where(denominator > 0, x / denominator, 0.0)

    new = list(slots)
    if rule.optimizer == "sgd":
        step = scalars.rate * g
    elif rule.optimizer == "momentum":
        new = [rule.b1 * slots[0] + g]
        step = scalars.rate * new[0]
    elif rule.optimizer == "rowwise_adagrad":
        mean = jnp.mean(jnp.square(g), axis=1)
        if gradients.mean_squares is not None:
            mean = of_row(gradients.mean_squares) * scalars.gradient_scale * scalars.gradient_scale
        new = [slots[0] + mean]
        step = quotient(jnp.asarray(scalars.rate), jnp.sqrt(new[0]) + rule.eps)[:, None] * g
    elif rule.optimizer == "adagrad":
        new = [slots[0] + g * g]
        step = scalars.rate * quotient(g, jnp.sqrt(new[0]) + rule.eps)
    else:
        new = [rule.b1 * slots[0] + (1 - rule.b1) * g, rule.b2 * slots[1] + (1 - rule.b2) * g * g]
        step = scalars.adam_rate * quotient(new[0], jnp.sqrt(new[1] / scalars.adam_correction) + rule.eps)
    old = _numbers(arrays.weights, rule.dtype)
    delta = -step - scalars.decay * old
    updated = old + delta
    if rule.dtype != "float32":
        assert gradients.draws is not None
        columns = jnp.arange(old.shape[1]) + scalars.first_column
        bits = counters.extend(of_row(gradients.draws)[:, None], columns[None])
        updated = delta = stochastic(updated, jnp.dtype(rule.dtype), bits).astype(jnp.float32)
    return touched, updated, new, delta


def check(
    bags: Bags, rule: Rule, arrays: Arrays, gradients: Gradients, scalars: Scalars
) -> tuple[jax.Array, jax.Array]:
    """Returns bool [V], whether a vector's gradient is not finite, and bool [], whether an update's values are not.

    The values are the optimizer's new ones and what is added to the weights; in a narrow table, the new weights.
    `Arrays.largest` lets the kernel save its time, and changes no result.
    """
    vectors = gradients.vectors.reshape(len(gradients.rows), bags.vectors, -1)
    touched, _, new, delta = _updated(bags, rule, arrays, gradients, scalars)
    bad = [(~jnp.isfinite(x).reshape(len(x), -1).all(axis=1) & touched).any() for x in (delta, *new)]
    return ~jnp.isfinite(vectors).all(axis=(0, 2)), jnp.stack(bad).any()


def update(bags: Bags, rule: Rule, arrays: Arrays, gradients: Gradients, scalars: Scalars, ok: jax.Array) -> Arrays:
    """Updates each row that a slot names, once, by the sum of its gradients.

    Args:
      bags: Which slots belong to which vector.
      rule: The optimizer.
      arrays: Weights and the optimizer's rows.
      gradients: And the rows they are of.
      scalars: The optimizer's rates.
      ok: bool []; nothing is written where it is false.

    Returns:
      The arrays, updated.
    """
    touched, updated, new, _ = _updated(bags, rule, arrays, gradients, scalars)
    write = touched & ok
    stored = jax.lax.bitcast_convert_type(updated.astype(jnp.dtype(rule.dtype)), arrays.weights.dtype)
    weights = jnp.where(write[:, None], stored, arrays.weights)
    slots = [jnp.where(write.reshape(-1, *[1] * (s.ndim - 1)), n, s) for n, s in zip(new, arrays.slots, strict=True)]

    def most(values: jax.Array) -> jax.Array:
        return jnp.max(jnp.where(write.reshape(-1, *[1] * (values.ndim - 1)), jnp.abs(values), 0.0))

    written = jnp.stack([most(_numbers(weights, rule.dtype)), *map(most, slots)])
    return Arrays(weights, slots, jnp.maximum(arrays.largest, written))
