"""The compiled operations on CPUs, as JAX calls them; `library.load` must have succeeded.

Each returns what the function of the same name in `reference` returns. Rows that are out of range end the program with
an error, before anything is written. Arrays that an operation can do without are passed as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.kernels.embedding_bag.bags import DTYPES, OPTIMIZERS, Arrays, Bags, Gradients, Rule, Scalars
from jaxrec.kernels.embedding_bag.library import target

_Array = jax.Array | None


def _none(dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(0, dtype)


def _or_none(array: _Array, dtype: Any = jnp.float32) -> jax.Array:
    return _none(dtype) if array is None else array


def _bags(bags: Bags) -> dict[str, Any]:
    return {"run": np.asarray(bags.runs, np.int64), "sentinel": np.int64(bags.sentinel)}


def lookup(
    bags: Bags, table: jax.Array, dtype: str, rows: jax.Array, weights: _Array = None, scales: _Array = None
) -> jax.Array:
    """See `reference.lookup`."""
    shape = jax.ShapeDtypeStruct((rows.shape[0], bags.vectors * table.shape[1]), jnp.float32)
    attributes = {"dtype": np.int64(DTYPES.index(dtype)), **_bags(bags)}
    call = jax.ffi.ffi_call(target("Lookup"), shape)
    return call(table, _or_none(scales), rows, _or_none(weights), **attributes)


def add_up(bags: Bags, gradient: jax.Array, size: int, rows: jax.Array, weights: _Array = None) -> jax.Array:
    """See `reference.add_up`."""
    shape = jax.ShapeDtypeStruct((size, gradient.shape[1] // bags.vectors), jnp.float32)
    return jax.ffi.ffi_call(target("AddUp"), shape)(rows, _or_none(weights), gradient, **_bags(bags))


def row_squares(bags: Bags, gradient: jax.Array, size: int, rows: jax.Array, weights: _Array = None) -> jax.Array:
    """See `reference.row_squares`."""
    shape = jax.ShapeDtypeStruct((rows.size,), jnp.float32)
    call = jax.ffi.ffi_call(target("RowSquares"), shape)
    dim = gradient.shape[1] // bags.vectors
    return call(rows, _or_none(weights), gradient, rows=np.int64(size), dim=np.int64(dim), **_bags(bags))


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "dtype": np.int64(DTYPES.index(rule.dtype)),
        "optimizer": np.int64(OPTIMIZERS.index(rule.optimizer)),
        "eps": np.float32(rule.eps),
        "b1": np.float32(rule.b1),
        "b2": np.float32(rule.b2),
    }


def _operands(arrays: Arrays, gradients: Gradients, scalars: jax.Array) -> tuple[jax.Array, ...]:
    g = gradients
    read = (g.rows, _or_none(g.weights), g.vectors, scalars, _or_none(g.mean_squares), _or_none(g.draws, jnp.uint32))
    return (*read, arrays.largest, arrays.weights, *arrays.slots)


def check(
    bags: Bags, rule: Rule, arrays: Arrays, gradients: Gradients, scalars: Scalars
) -> tuple[jax.Array, jax.Array]:
    """See `reference.check`."""
    shapes = (jax.ShapeDtypeStruct((bags.vectors,), jnp.bool_), jax.ShapeDtypeStruct((), jnp.bool_))
    operands = _operands(arrays, gradients, scalars.packed(False))
    bad_vectors, bad_update = jax.ffi.ffi_call(target("Check"), shapes)(*operands, **_bags(bags), **_rule(rule))
    return bad_vectors, bad_update


def update(bags: Bags, rule: Rule, arrays: Arrays, gradients: Gradients, scalars: Scalars, ok: jax.Array) -> Arrays:
    """See `reference.update`. The arrays are written in place where the program donates them."""
    operands = _operands(arrays, gradients, scalars.packed(ok))
    first = len(operands) - 2 - len(arrays.slots)
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[first:])
    aliases = {first + i: i for i in range(len(shapes))}
    call = jax.ffi.ffi_call(target("Update"), shapes, input_output_aliases=aliases)
    largest, weights, *slots = call(*operands, **_bags(bags), **_rule(rule))
    return Arrays(weights, slots, largest)


def moved_bytes(operation: str, operands: Sequence[tuple[int, tuple[int, ...]]], results: int) -> tuple[float, float]:
    """Returns the bytes that an operation moves (in order, by index), as if no row were named twice.

    Args:
      operation: One of `library.TARGETS`.
      operands: (bytes, dimensions) of each, in the order of the calls above.
      results: Bytes of the results.
    """
    sizes = [size for size, _ in operands]

    def of_rows(array: tuple[int, tuple[int, ...]], rows: tuple[int, tuple[int, ...]]) -> float:
        """Bytes of one row, times how many are named."""
        return array[0] / max(array[1][0], 1) * rows[0] / 4

    if operation == "Lookup":  # table, scales, rows, weights
        table, scales, rows, weights = operands
        by_index = of_rows(table, rows) + (of_rows(scales, rows) if scales[0] else 0.0)
        return float(rows[0] + weights[0] + results), by_index
    if operation == "Update":  # rows, weights, gradient, scalars, mean squares, draws, largest, table, slots
        return float(sum(sizes[:6])), 2.0 * sum(of_rows(array, operands[0]) for array in operands[7:])
    if operation == "Check":  # The same; where bounds suffice, no row is read.
        return float(sum(sizes[:3])), 0.0
    return float(sum(sizes) + results), 0.0
