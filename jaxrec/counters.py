"""Random numbers that depend on where a value stands in the model, never on which device computes it.

A value's bits are a hash of its coordinates, for instance (seed, step, layer, row of the global batch, column), so that
every mesh draws the same numbers and no generator state is kept. The mixing function is `lowbias32` of C. Wellons,
"Prospecting for Hash Functions" (2018), public domain.
"""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def tag(name: str) -> int:
    """Returns the 32-bit coordinate of a name."""
    return zlib.crc32(name.encode())


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def bits(*coordinates: ArrayLike) -> jax.Array:
    """Returns uint32 bits of the broadcast shape of `coordinates` (integers, taken modulo 2^32)."""
    return extend(jnp.uint32(0x9E3779B9), *coordinates)


def extend(state: jax.Array, *coordinates: ArrayLike) -> jax.Array:
    """Returns what `bits` returns for more coordinates, from what it returned for the first ones."""
    for c in coordinates:
        word = jnp.uint32(c & 0xFFFFFFFF) if isinstance(c, int) else jnp.asarray(c).astype(jnp.uint32)
        state = _mix(state ^ (word * jnp.uint32(0x9E3779B1) + jnp.uint32(0x85EBCA6B)))
    return state


def uniform(*coordinates: ArrayLike) -> jax.Array:
    """Returns float32 draws from [0, 1), of 24 bits each."""
    return (bits(*coordinates) >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
