"""How features meet: DLRM's dot products, and DCNv2's low-rank cross layers.

Shape suffixes: B rows, F features (the bottom MLP's output among them), D dim, X flattened width F * D.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrec.models.layers import Linear
from jaxrec.precision import Policy


def dot_interaction(features: jax.Array, policy: Policy) -> jax.Array:
    """[B, F, D] -> float32 [B, F (F - 1) / 2], the dot products of all pairs of different features.

    Source: Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation Systems".
    """
    x = features.astype(policy.compute)
    products = jnp.einsum("bfd,bgd->bfg", x, x, precision=policy.product, preferred_element_type=policy.accumulate)
    first, second = np.tril_indices(features.shape[1], -1)
    return products[:, first, second]


class CrossNetwork(nnx.Module):
    """DCNv2's low-rank cross layers: x_{l+1} = x_0 * ((x_l U) V + b) + x_l.

    Source: Wang et al. 2021, "DCN V2: Improved Deep & Cross Network", equation 2 with W = U V.
    """

    def __init__(self, width: int, layers: int, rank: int, policy: Policy, rngs: nnx.Rngs):
        self.down = nnx.List([Linear(width, rank, policy, rngs, bias=False) for _ in range(layers)])
        self.up = nnx.List([Linear(rank, width, policy, rngs) for _ in range(layers)])

    def __call__(self, x0: jax.Array) -> jax.Array:
        """float32 [B, X] -> float32 [B, X]."""
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = x0 * up(down(x)) + x
        return x
