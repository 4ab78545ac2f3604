"""Dense layers: linear maps and perceptrons with a stated precision, and dropout drawn from counters.

Shape suffixes: B rows of this device's batch, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec import counters
from jaxrec.fsdp import apply_whole
from jaxrec.precision import Policy


class DropoutSource(NamedTuple):
    """The coordinates that dropout draws from.

    Attributes:
      seed: The run's.
      step: int32 scalar.
      rows: int32 [B], each row's place in the global batch.
    """

    seed: int
    step: jax.Array
    rows: jax.Array


def dropout(x: jax.Array, rate: float, source: DropoutSource | None, layer: str) -> jax.Array:
    """Zeroes entries of [B, O] with probability `rate` and scales the rest; the identity without a source.

    The mask is a function of (seed, step, layer, global row, column): it is the same on every mesh.
    """
    if source is None or rate == 0:
        return x
    column = jnp.arange(x.shape[-1])
    keep = counters.uniform(source.seed, source.step, counters.tag(layer), source.rows[:, None], column[None]) >= rate
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


class Linear(nnx.Module):
    """x W + b with operands in the policy's compute type and float32 sums."""

    def __init__(self, inputs: int, outputs: int, policy: Policy, rngs: nnx.Rngs, *, bias: bool = True):
        init = nnx.initializers.variance_scaling(2.0, "fan_avg", "normal")
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), policy.param))
        self.bias = nnx.Param(jnp.zeros((outputs,), policy.param)) if bias else None
        self.policy = policy
        self.shapes = ((inputs, outputs), *([(outputs,)] if bias else []))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, I] -> float32 [B, O]. The parameters may be this device's parts of them, see `fsdp`."""

        def apply(x: jax.Array, kernel: jax.Array, *bias: jax.Array) -> jax.Array:
            compute = self.policy.compute
            y = jnp.dot(
                x.astype(compute),
                kernel.astype(compute),
                precision=self.policy.product,
                preferred_element_type=self.policy.accumulate,
            )
            return y + bias[0] if bias else y

        arrays = (self.kernel[...], *([] if self.bias is None else [self.bias[...]]))
        return apply_whole(apply, x, arrays, self.shapes)


class MLP(nnx.Module):
    """Linear layers with ReLU between them, and after the last where `activate_last`."""

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        policy: Policy,
        rngs: nnx.Rngs,
        *,
        activate_last: bool,
        dropout: float = 0.0,
        name: str = "mlp",
    ):
        sizes = [inputs, *widths]
        self.layers = nnx.List([Linear(i, o, policy, rngs) for i, o in itertools.pairwise(sizes)])
        self.activate_last = activate_last
        self.dropout = dropout
        self.name = name

    def __call__(self, x: jax.Array, source: DropoutSource | None) -> jax.Array:
        """[B, inputs] -> float32 [B, widths[-1]]; dropout follows every activation."""
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i + 1 < len(self.layers) or self.activate_last:
                x = dropout(jax.nn.relu(x), self.dropout, source, f"{self.name}/{i}")
        return x
