"""Fully sharded dense parameters: each array flattened, padded with zeros, and split over the mesh's `model` axis.

A layer gathers an array just before it uses it and forgets it afterwards; the backward pass gathers it again, and the
transpose of the gather reduces and scatters its gradient. So a device holds one layer's whole arrays at a time. Arrays
of fewer elements than shards stay whole.

Source: Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; Rajbhandari et al. 2020,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", stage 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

DENSE_SHARDINGS = ("replicated", "fsdp")


def is_split(shape: tuple[int, ...], shards: int) -> bool:
    """Returns whether an array of this (whole) shape is split over `shards` devices."""
    return shards > 1 and math.prod(shape) >= shards


def pack(array: jax.Array, shards: int) -> jax.Array:
    """Returns a whole array as it is stored globally: [shards * ceil(n / shards)], or as it is where it is not split.

    Args:
      array: Whole.
      shards: Size of the `model` axis, or 1 for no splitting.
    """
    if not is_split(array.shape, shards):
        return array
    return jnp.pad(array.reshape(-1), (0, -array.size % shards))


def stored_shape(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """Returns the shape that `pack` gives an array of `shape`."""
    return (-(-math.prod(shape) // shards) * shards,) if is_split(shape, shards) else shape


def unpack(stored: np.ndarray, shape: tuple[int, ...], shards: int) -> np.ndarray:
    """The inverse of `pack`."""
    return stored[: math.prod(shape)].reshape(shape) if is_split(shape, shards) else stored


def apply_whole(
    function: Callable[..., jax.Array], x: jax.Array, arrays: tuple[jax.Array, ...], shapes: tuple[tuple[int, ...], ...]
) -> jax.Array:
    """Returns function(x, *whole arrays); gathers those of which this device holds a part. Inside shard_map.

    Bytes received per device: (model - 1) / model of each split array, in the forward pass and again in the backward,
    and as much for its gradient.

    Args:
      function: Of x and the whole arrays; it is run again in the backward pass where an array is split.
      x: Passed on.
      arrays: Whole, or this device's parts: which of them, their shapes tell.
      shapes: Of the whole arrays.
    """
    if all(part.shape == shape for part, shape in zip(arrays, shapes, strict=True)):
        return function(x, *arrays)

    def gathered(x: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
        return function(x, *map(_whole, parts, shapes))

    # A gather depends on parameters alone, so that a compiler may do all of them first, share them between the forward
    # and the backward pass, and hold every layer's whole arrays at once. So each is made to depend on what it is for.
    @jax.custom_vjp
    def layer(x: jax.Array, parts: tuple[jax.Array, ...]) -> jax.Array:
        return gathered(x, _after(x, parts))

    def forward(x: jax.Array, parts: tuple[jax.Array, ...]):
        return layer(x, parts), (x, parts)

    def backward(residuals: tuple[jax.Array, tuple[jax.Array, ...]], d_y: jax.Array):
        x, parts = residuals
        return jax.vjp(gathered, x, _after(d_y, parts))[1](d_y)

    layer.defvjp(forward, backward)
    return layer(x, arrays)


def _after(x: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the parts, for use after x is known.

    XLA:CPU drops `optimization_barrier`, so x enters by value, as 0 times one of its elements; if that is not finite,
    the step is refused anyway.
    """
    nothing = 0.0 * x.reshape(-1)[0]
    return tuple(part + nothing for part in parts)


def _whole(part: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if part.shape == shape:
        return part
    return jax.lax.all_gather(part, "model", tiled=True)[: math.prod(shape)].reshape(shape)
