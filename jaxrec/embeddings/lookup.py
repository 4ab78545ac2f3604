"""From ids to pooled activations on one device, and back from their gradients to row gradients.

Shape suffixes: B rows of this device's batch, S slots of the group, F features of a segment, L max_length, D dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jaxrec.embeddings.plan import Group, Segment


def places_of_slots(group: Group, ids: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns int32 [B, S]: the place of the row that each slot names (see `plan`).

    Args:
      group: The layout.
      ids: int32 [B, K] of the batch.
      lengths: int32 [B, bags] of the batch. Slots past them name the sentinel.
    """
    offsets_S = jnp.asarray(group.offsets[np.asarray(group.slot_tables)], jnp.int32)
    columns = np.asarray(group.columns)
    if np.array_equal(columns, np.arange(columns[0], columns[0] + len(columns))):
        ids_BS = jax.lax.slice_in_dim(ids, int(columns[0]), int(columns[0]) + len(columns), axis=1)
    else:
        ids_BS = jnp.take(ids, columns, axis=1)
    places_BS = group.place(ids_BS + offsets_S)
    parts, start = [], 0
    for segment in group.segments:
        part = places_BS[:, start : start + segment.slots]
        if segment.bags:
            valid = _valid(segment, lengths).reshape(part.shape)
            part = jnp.where(valid, part, group.sentinel)
        parts.append(part)
        start += segment.slots
    return jnp.concatenate(parts, axis=1)


def pool(group: Group, vectors: jax.Array, lengths: jax.Array) -> dict[str, jax.Array]:
    """Combines each bag's vectors.

    Args:
      group: The layout.
      vectors: float32 [B, S, D], zeros where a slot names the sentinel.
      lengths: int32 [B, bags].

    Returns:
      Feature -> [B, D], or [B, L, D] for the combiner `none`. An empty bag gives zeros.
    """
    pooled, start = {}, 0
    for segment in group.segments:
        v = vectors[:, start : start + segment.slots]
        v = v.reshape(v.shape[0], len(segment.features), segment.length, v.shape[-1])  # [B, F, L, D]
        start += segment.slots
        if segment.combiner == "none":
            pooled |= {name: v[:, i] for i, name in enumerate(segment.features)}
            continue
        v = v.sum(axis=2) if segment.length > 1 else v[:, :, 0]
        if segment.combiner == "mean" and segment.bags:
            v = v * _inverse_length(segment, lengths)[..., None]
        # Cut from one matrix, so that XLA finds the features side by side again where a model puts them so.
        side_by_side, D = v.reshape(v.shape[0], -1), v.shape[-1]
        pooled |= {name: side_by_side[:, i * D : (i + 1) * D] for i, name in enumerate(segment.features)}
    return pooled


def spread(group: Group, gradients: Mapping[str, jax.Array], lengths: jax.Array) -> jax.Array:
    """The transpose of `pool`: returns [B, S, D], what each slot's vector adds to the gradient of its row.

    Slots past a bag's length get values too: they name the sentinel, whose update is never applied.
    """
    parts = []
    for segment in group.segments:
        of_features = [gradients[name] for name in segment.features]
        if segment.combiner == "none":
            g = jnp.stack(of_features, axis=1)  # [B, F, L, D]
        else:
            g = jnp.concatenate(of_features, axis=1).reshape(
                -1, len(of_features), of_features[0].shape[-1]
            )  # [B, F, D]
            if segment.combiner == "mean" and segment.bags:
                g = g * _inverse_length(segment, lengths)[..., None]
            g = jnp.broadcast_to(g[:, :, None], (*g.shape[:2], segment.length, g.shape[-1]))
        parts.append(g.reshape(g.shape[0], segment.slots, g.shape[-1]))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def slot_weights(group: Group, lengths: jax.Array) -> jax.Array | None:
    """Returns float32 [B, S], by what each slot's vector is multiplied in the sum that pools it; None: all by 1."""
    if not any(s.combiner == "mean" and s.bags for s in group.segments):
        return None
    parts = []
    for s in group.segments:
        of_feature = (
            _inverse_length(s, lengths)
            if s.combiner == "mean" and s.bags
            else jnp.ones((lengths.shape[0], len(s.features)))
        )
        parts.append(jnp.repeat(of_feature, s.length, axis=1, total_repeat_length=s.slots))
    return jnp.concatenate(parts, axis=1)


def _lengths(segment: Segment, lengths: jax.Array) -> jax.Array:
    return jnp.take(lengths, np.asarray(segment.bags), axis=1)  # [B, F]


def _valid(segment: Segment, lengths: jax.Array) -> jax.Array:
    return jnp.arange(segment.length) < _lengths(segment, lengths)[..., None]  # [B, F, L]


def _inverse_length(segment: Segment, lengths: jax.Array) -> jax.Array:
    return 1.0 / jnp.maximum(_lengths(segment, lengths), 1).astype(jnp.float32)  # [B, F]
