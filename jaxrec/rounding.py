"""Stochastic rounding: to one of the two neighbours in a narrower type, each as likely as the value is near to it.

So the mean of many roundings is the value, and an update smaller than half a step of the type is not always lost.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def stochastic(x: jax.Array, dtype: jnp.dtype, bits: jax.Array) -> jax.Array:
    """Returns x in `dtype`; the same value where it has one there, and where x is not finite.

    Beyond the largest value of `dtype` the outcome may be infinite: callers check.

    Args:
      x: float32.
      dtype: bfloat16 or float16.
      bits: uint32 of x's shape; the draw.

    Raises:
      ValueError: Another type.
    """
    if dtype == jnp.bfloat16:
        rounded = _to_bfloat16(x, bits)
    elif dtype == jnp.float16:
        rounded = _to_float16(x, bits)
    else:
        raise ValueError(f"dtype is {dtype}, but must be bfloat16 or float16")
    # The bits of a NaN, increased, may be those of a number.
    return jnp.where(jnp.isfinite(x), rounded, x.astype(dtype))


def _to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    # bfloat16 is the upper half of float32: adding 16 random bits carries into it with the right probability.
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    return jax.lax.bitcast_convert_type((raw >> 16).astype(jnp.uint16), jnp.bfloat16)


def _to_float16(x: jax.Array, bits: jax.Array) -> jax.Array:
    raw = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # 11 significant bits, but for numbers below 2^-14 a fixed step of 2^-24.
    exponent = jnp.maximum(((raw >> 23) & 0xFF).astype(jnp.int32) - 127, -14) - 10
    step = jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    steps = jnp.abs(x) / step  # Exact: step is a power of two.
    below = jnp.floor(steps)
    up = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-24) < steps - below
    return jnp.copysign((below + up) * step, x).astype(jnp.float16)
