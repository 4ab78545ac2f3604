"""Lookup and update by the compiled kernel for CPUs; the same functions as `xla_engine`'s.

No activation's gradient is spread over slots, no row is merged before the update: the kernel reads the gradients of the
pooled vectors, and writes each touched row once. What an update would write is checked before, by bounds (see `check`).

Shape suffixes: as in `xla_engine`; V vectors of a row of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.embeddings import lookup as pooling
from jaxrec.embeddings import xla_engine
from jaxrec.embeddings.group_arrays import (
    Source,
    Table,
    UpdateContext,
    learning_rate,
    numbers,
    own_columns,
    rounding_hash,
)
from jaxrec.embeddings.plan import Group, Segment
from jaxrec.kernels.embedding_bag import cpu
from jaxrec.kernels.embedding_bag.bags import Arrays, Bags, Gradients, Rule, Scalars


class Proposal(NamedTuple):
    """All that the update needs; it is computed when it is written.

    Attributes:
      gradients: Yet to be merged.
      scalars: The kernel's, by name.
    """

    gradients: Gradients
    scalars: dict[str, jax.Array]


def _bags(group: Group, sentinel: int) -> Bags:
    runs = []
    for s in group.segments:
        runs += [1] * s.slots if s.combiner == "none" else [s.length] * len(s.features)
    return Bags(tuple(runs), sentinel)


def _vectors(group: Group) -> Iterator[tuple[str, Segment, int, int]]:
    """Yields (feature, its segment, its first vector of the V, the one after its last)."""
    first = 0
    for segment in group.segments:
        for name in segment.features:
            end = first + (segment.length if segment.combiner == "none" else 1)
            yield name, segment, first, end
            first = end


def work_shape(group: Group) -> tuple[tuple[int, ...], jnp.dtype]:
    """Returns shape and type of what the engine keeps between steps, of one device: `largest` of the kernel."""
    return (1 + len(group.rule.slots),), jnp.dtype(jnp.float32)


def first_work(group: Group, weights: jax.Array, slots: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the largest magnitudes of weights and slots."""
    # The bounds hold for accumulators that are not negative; others are always looked at.
    negative = [jnp.any(s < 0) & (name == "accumulator") for name, s in slots.items()]
    most = [jnp.max(jnp.abs(x.astype(jnp.float32))) for x in (numbers(weights, group), *slots.values())]
    limits = [most[0], *(jnp.where(n, jnp.inf, m) for n, m in zip(negative, most[1:], strict=True))]
    return jnp.stack(limits)


def look_up(group: Group, source: Source, lengths: jax.Array) -> dict[str, jax.Array]:
    """Returns feature -> float32 [B, D] or [B, L, D], pooled from the rows of `source`."""
    index_BS = source.slots.reshape(lengths.shape[0], -1)
    weights = pooling.slot_weights(group, lengths)
    pooled = cpu.lookup(_bags(group, source.sentinel), source.vectors, group.dtype.name, index_BS, weights)
    dim = source.vectors.shape[1]
    activations = {}
    for name, segment, first, end in _vectors(group):
        of_feature = pooled[:, first * dim : end * dim]
        activations[name] = of_feature.reshape(-1, end - first, dim) if segment.combiner == "none" else of_feature
    return activations


def _side_by_side(group: Group, gradients: Mapping[str, jax.Array]) -> jax.Array:
    """Returns float32 [B, V * D]."""
    return jnp.concatenate([gradients[f].reshape(gradients[f].shape[0], -1) for f in group.features], axis=1)


def add_up(
    group: Group, index: jax.Array, gradients: Mapping[str, jax.Array], lengths: jax.Array, size: int
) -> jax.Array:
    """Returns float32 [size, D], the transpose of `look_up`: sums of the occurrences whose `index` [N] is the row."""
    index_BS = index.reshape(lengths.shape[0], -1)
    weights = pooling.slot_weights(group, lengths)
    return cpu.add_up(_bags(group, size), _side_by_side(group, gradients), size, index_BS, weights)


def merge_slots(
    group: Group, table: Table, rows: jax.Array, gradients: Mapping[str, jax.Array], lengths: jax.Array
) -> Gradients:
    """Takes the gradients of the features' activations, for rows [N] that this device holds."""
    del table
    rows_BS = rows.reshape(lengths.shape[0], -1)
    return Gradients(_side_by_side(group, gradients), rows_BS, pooling.slot_weights(group, lengths))


def merge_rows(group: Group, table: Table, rows: jax.Array, gradients: jax.Array) -> Gradients:
    """Takes gradients [M, D] of rows [M]; the shape of these tells them from those of slots."""
    del group, table
    return Gradients(gradients, rows)


def _operands(group: Group, gradients: Gradients) -> tuple[Bags, Gradients]:
    """Returns what the kernel takes for gradients of slots or of rows."""
    if gradients.rows.ndim == 2:
        return _bags(group, group.shard_rows), gradients
    return Bags((1,), group.shard_rows), gradients._replace(rows=gradients.rows[:, None])


def _squares(group: Group, gradients: Gradients) -> jax.Array:
    bags, g = _operands(group, gradients)
    return cpu.row_squares(bags, g.vectors, group.shard_rows + 1, g.rows, g.weights)


def squared(group: Group, gradients: Gradients) -> jax.Array:
    """Returns the sum of the squares of this device's row gradients, each row counted once."""
    return jnp.sum(_squares(group, gradients))


def propose(group: Group, table: Table, gradients: Gradients, context: UpdateContext) -> Proposal:
    """Computes the group's rates, and what of a row is on other devices."""
    del table
    optimizer, rate = group.tables[0].optimizer, learning_rate(group, context)
    scalars = {"rate": rate, "decay": rate * optimizer.weight_decay}
    if context.scale is not None:
        scalars["gradient_scale"] = context.scale
    if optimizer.name == "adam":
        # As in `jaxrec.optim.adam`: 1 - b^t by expm1.
        t = (context.step + 1).astype(jnp.float32)
        scalars["adam_rate"] = rate / -jnp.expm1(t * jnp.log(optimizer.b1))
        scalars["adam_correction"] = -jnp.expm1(t * jnp.log(optimizer.b2))
    if group.column_shards > 1:
        scalars["first_column"] = own_columns(group)[0]
    if optimizer.name == "rowwise_adagrad" and group.column_shards > 1:
        mean_squares = jax.lax.psum(_squares(group, gradients), "model") / group.dim
        gradients = gradients._replace(mean_squares=mean_squares)
    if group.dtype != group.stored:
        gradients = gradients._replace(draws=rounding_hash(group, gradients.rows.reshape(-1), context))
    return Proposal(gradients, scalars)


def _rule(group: Group) -> Rule:
    optimizer = group.tables[0].optimizer
    return Rule(optimizer.name, group.dtype.name, optimizer.eps, optimizer.b1, optimizer.b2)


def _arrays(table: Table) -> Arrays:
    return Arrays(table.weights, list(table.slots.values()), table.work)


def check(
    group: Group, table: Table, proposal: Proposal, gradients: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns a bool per feature, whether its gradient is not finite, and one for the update's values.

    One pass over the gradients gives their largest magnitude. Where that and `Table.work` leave no way for an update to
    become infinite, no row is read; else every update is computed, and not written.
    """
    bags, g = _operands(group, proposal.gradients)
    bad_vectors, bad_update = cpu.check(bags, _rule(group), _arrays(table), g, Scalars(**proposal.scalars))
    if proposal.gradients.rows.ndim == 1:  # These are sums over devices; the features' own gradients are still apart.
        return xla_engine.bad_features(group, gradients), bad_update
    return {name: jnp.any(bad_vectors[first:end]) for name, _, first, end in _vectors(group)}, bad_update


def commit(group: Group, table: Table, proposal: Proposal, ok: jax.Array) -> Table:
    """Updates the touched rows in place where `ok`."""
    bags, g = _operands(group, proposal.gradients)
    new = cpu.update(bags, _rule(group), _arrays(table), g, Scalars(**proposal.scalars), ok)
    return Table(new.weights, dict(zip(table.slots, new.slots, strict=True)), new.largest)
