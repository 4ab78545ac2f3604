"""DLRM: a bottom MLP over dense features, embeddings, an interaction, a top MLP.

Sources: Naumov et al. 2019 (dot interaction); Wang et al. 2021 and MLPerf's DLRM-DCNv2 (cross interaction).
Shape suffixes: B rows of this device's batch, N dense columns, F sparse features, D dim, T tasks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrec.checks import one_of, require
from jaxrec.data.schema import Schema
from jaxrec.models.interactions import CrossNetwork, dot_interaction
from jaxrec.models.layers import MLP, DropoutSource, dropout
from jaxrec.precision import Policy

INTERACTIONS = ("dot", "cross")


@dataclasses.dataclass(frozen=True)
class DLRMConfig:
    """A DLRM.

    Attributes:
      bottom_mlp: Widths over the dense features, each followed by ReLU; with `dot`, the last must be the embeddings'
        dim.
      interaction: `dot`, or `cross` (DCNv2).
      cross_layers: With `cross`.
      cross_rank: With `cross`.
      top_mlp: Hidden widths; one logit a task follows.
      dropout: Rate after each hidden layer of the top MLP.
      feature_dropout: Rate on the values that enter the interaction (embeddings and the bottom MLP's output); it keeps
        a small data set's embeddings from being memorised.
    """

    bottom_mlp: tuple[int, ...] = (64, 16)
    interaction: str = "dot"
    cross_layers: int = 2
    cross_rank: int = 32
    top_mlp: tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    feature_dropout: float = 0.0

    def __post_init__(self):
        one_of("model.interaction", self.interaction, INTERACTIONS)
        for field in ("dropout", "feature_dropout"):
            rate = getattr(self, field)
            require(0 <= rate < 1, f"model.{field} is {rate}, but must be at least 0 and below 1")
        for field in ("bottom_mlp", "top_mlp"):
            require(min(getattr(self, field), default=1) >= 1, f"model.{field} holds a width below 1")
        require(len(self.bottom_mlp) >= 1, "model.bottom_mlp is empty, but needs at least one width")
        for field in ("cross_layers", "cross_rank"):
            require(getattr(self, field) >= 1, f"model.{field} is {getattr(self, field)}, but must be at least 1")

    def create(self, schema: Schema, dim: int, policy: Policy, rngs: nnx.Rngs) -> DLRM:
        """Returns the model for a data set's schema and embeddings of `dim` columns."""
        return DLRM(self, schema, dim, policy, rngs)


class DLRM(nnx.Module):
    """See the module's docstring. Regions of a trace: bottom_mlp, interaction, top_mlp."""

    REGIONS = ("bottom_mlp", "interaction", "top_mlp")

    def __init__(self, config: DLRMConfig, schema: Schema, dim: int, policy: Policy, rngs: nnx.Rngs):
        for f in schema.features:
            require(
                f.combiner != "none",
                f"feature {f.name} is looked up per position, but DLRM takes pooled features (sum or mean)",
            )
        self.features = tuple(f.name for f in schema.features)
        self.policy = policy
        self.interaction = config.interaction
        self.feature_dropout = config.feature_dropout
        # Without dense columns there is no bottom MLP, and the features are the embeddings alone.
        widths = [dim] * len(self.features)
        bottom = None
        if schema.dense:
            bottom = MLP(len(schema.dense), config.bottom_mlp, policy, rngs, activate_last=True, name="bottom_mlp")
            widths.insert(0, config.bottom_mlp[-1])
        self.bottom_mlp = bottom
        if config.interaction == "dot":
            require(
                widths[0] == dim,
                f"model.bottom_mlp ends with {widths[0]}, but the dot interaction needs embedding.dim, which is {dim}",
            )
            width = (widths[0] if schema.dense else 0) + len(widths) * (len(widths) - 1) // 2
        else:
            width = sum(widths)
            self.cross = CrossNetwork(width, config.cross_layers, config.cross_rank, policy, rngs)
        self.top_mlp = MLP(
            width,
            (*config.top_mlp, len(schema.tasks)),
            policy,
            rngs,
            activate_last=False,
            dropout=config.dropout,
            name="top_mlp",
        )

    def __call__(
        self, dense: jax.Array, activations: Mapping[str, jax.Array], source: DropoutSource | None
    ) -> jax.Array:
        """Returns logits, float32 [B, T].

        Args:
          dense: float32 [B, N].
          activations: Feature -> float32 [B, D].
          source: What dropout draws from; None at evaluation.
        """
        features = [activations[name] for name in self.features]
        if self.bottom_mlp is not None:
            with jax.named_scope("bottom_mlp"):
                features.insert(0, self.bottom_mlp(dense, source))
        with jax.named_scope("interaction"):
            x = dropout(jnp.concatenate(features, axis=1), self.feature_dropout, source, "features")
            if self.interaction == "dot":
                stacked_BFD = x.reshape(x.shape[0], len(features), -1)
                first = [stacked_BFD[:, 0]] if self.bottom_mlp is not None else []
                x = jnp.concatenate([*first, dot_interaction(stacked_BFD, self.policy)], axis=1)
            else:
                x = self.cross(x)
        with jax.named_scope("top_mlp"):
            return self.top_mlp(x, source)
