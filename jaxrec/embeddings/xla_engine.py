"""Lookup and update by XLA's own operations: on any device, and on CPUs without the compiled kernel.

`tables` calls an engine's functions, the same ones of each; they work on one group, inside the step's program.

Shape suffixes: B rows of this device's batch, S slots of the group, N = B * S occurrences, M occurrences that reach
this device, D this device's columns.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrec import counters
from jaxrec.embeddings import lookup as pooling
from jaxrec.embeddings.group_arrays import (
    Source,
    Table,
    UpdateContext,
    learning_rate,
    numbers,
    own_columns,
    rounding_hash,
    row_mean,
)
from jaxrec.embeddings.merge import IN_BOUNDS, merge
from jaxrec.embeddings.plan import Group
from jaxrec.optim.row_rule import Context
from jaxrec.rounding import stochastic


class RowGradients(NamedTuple):
    """The gradients of the rows that a device holds.

    Attributes:
      rows: int32 [M], local rows; the sentinel where there is none.
      gradient: float32 [M, D], of the global batch; 0 at sentinels.
      scratch: The scratch after merging.
    """

    rows: jax.Array
    gradient: jax.Array
    scratch: jax.Array


class Proposal(NamedTuple):
    """An update that is computed but not written.

    Attributes:
      rows: int32 [M], local rows; the sentinel where nothing is to be written.
      weights: [M, D]. Of a float32 table, what is to be added to the weights (one pass over them); of a narrower one,
        the new weights, rounded, in its type.
      slots: New slot values, [M] or [M, D].
      scratch: The scratch after merging.
    """

    rows: jax.Array
    weights: jax.Array
    slots: dict[str, jax.Array]
    scratch: jax.Array


def work_shape(group: Group) -> tuple[tuple[int, ...], jnp.dtype]:
    """Returns shape and type of what the engine keeps between steps, of one device: the scratch of `merge`."""
    return (group.shard_rows + 1,), jnp.dtype(jnp.int32)


def first_work(group: Group, weights: jax.Array, slots: Mapping[str, jax.Array]) -> jax.Array:
    """Returns it before the first step."""
    del slots
    return jnp.zeros(weights.shape[:1], jnp.int32)


def look_up(group: Group, source: Source, lengths: jax.Array) -> dict[str, jax.Array]:
    """Returns feature -> float32 [B, D] or [B, L, D], pooled from the rows of `source`."""
    vectors = source.vectors
    if source.sentinel == vectors.shape[0]:
        vectors = jnp.concatenate([vectors, jnp.zeros((1, vectors.shape[1]), vectors.dtype)])
    of_slots = numbers(vectors.at[source.slots].get(mode=IN_BOUNDS), group).astype(jnp.float32)
    return pooling.pool(group, of_slots.reshape(lengths.shape[0], -1, of_slots.shape[-1]), lengths)


def add_up(
    group: Group, index: jax.Array, gradients: Mapping[str, jax.Array], lengths: jax.Array, size: int
) -> jax.Array:
    """Returns float32 [size, D], the transpose of `look_up`: sums of the occurrences whose `index` [N] is the row."""
    spread = pooling.spread(group, gradients, lengths).reshape(-1, group.dim)
    return jnp.zeros((size + 1, group.dim), spread.dtype).at[index].add(spread, mode=IN_BOUNDS)[:-1]


def merge_slots(
    group: Group, table: Table, rows: jax.Array, gradients: Mapping[str, jax.Array], lengths: jax.Array
) -> RowGradients:
    """Merges the gradients of the features' activations, for rows [N] that this device holds."""
    return merge_rows(group, table, rows, pooling.spread(group, gradients, lengths).reshape(-1, group.dim))


def merge_rows(group: Group, table: Table, rows: jax.Array, gradients: jax.Array) -> RowGradients:
    """Merges gradients [M, D] of rows [M]."""
    merged = merge(rows, gradients, table.work)
    write = merged.first & (rows != group.shard_rows)
    # Everything that is not written is sent to the sentinel with gradient 0, whose update is the identity.
    return RowGradients(
        jnp.where(write, rows, group.shard_rows), jnp.where(write[:, None], merged.gradient, 0.0), merged.scratch
    )


def squared(group: Group, gradients: RowGradients) -> jax.Array:
    """Returns the sum of the squares of this device's row gradients, each row counted once."""
    del group
    return jnp.sum(jnp.square(gradients.gradient))


def propose(group: Group, table: Table, gradients: RowGradients, context: UpdateContext) -> Proposal:
    """Computes the group's update."""
    rows, gradient, scratch = gradients
    if context.scale is not None:
        gradient *= context.scale
    old = {name: s.at[rows].get(mode=IN_BOUNDS) for name, s in table.slots.items()}
    rate = learning_rate(group, context)
    delta, slots = group.rule.update(gradient, old, Context(rate, context.step, functools.partial(row_mean, group)))
    narrow, decay = group.dtype != group.stored, group.tables[0].optimizer.weight_decay
    if decay or narrow:
        weights = numbers(table.weights.at[rows].get(mode=IN_BOUNDS), group).astype(jnp.float32)
        delta -= rate * decay * weights
        if narrow:
            draws = counters.extend(rounding_hash(group, rows, context)[:, None], own_columns(group)[None])
            # The sentinel's 0 is a value of every type, so that its draw, some row's own, does not matter.
            delta = stochastic(weights + delta, group.dtype, draws)
    return Proposal(rows, delta, slots, scratch)


def check(
    group: Group, table: Table, proposal: Proposal, gradients: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns a bool per feature, whether its gradient is not finite, and one for the update's values."""
    del table
    values = [proposal.weights, *proposal.slots.values()]
    return bad_features(group, gradients), jnp.any(jnp.stack([~jnp.all(jnp.isfinite(v)) for v in values]))


def bad_features(group: Group, gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns a bool per feature.

    All are swept at once, in the order in which they were pooled: a model's gradient has them side by side.
    """
    flat = {name: gradients[name].reshape(gradients[name].shape[0], -1) for name in group.features}
    bad_columns = ~jnp.all(jnp.isfinite(jnp.concatenate(list(flat.values()), axis=1)), axis=0)
    bad, end = {}, 0
    for name, g in flat.items():
        bad[name] = jnp.any(bad_columns[end : end + g.shape[1]])
        end += g.shape[1]
    return bad


def commit(group: Group, table: Table, proposal: Proposal, ok: jax.Array) -> Table:
    """Writes the proposal in place where `ok`; otherwise only the sentinel is rewritten with what it holds."""
    rows = jnp.where(ok, proposal.rows, group.shard_rows)
    change = jnp.where(ok, proposal.weights, jnp.zeros_like(proposal.weights))
    change, at = jax.lax.bitcast_convert_type(change, group.stored), table.weights.at[rows]
    weights = at.add(change, mode=IN_BOUNDS) if group.dtype == group.stored else at.set(change, mode=IN_BOUNDS)
    slots = {
        name: s.at[rows].set(jnp.where(ok, proposal.slots[name], group.rule.initial), mode=IN_BOUNDS)
        for name, s in table.slots.items()
    }
    return Table(weights, slots, proposal.scratch)
