"""The arrays of a group of tables, and what both engines need to know of its rows."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrec import counters
from jaxrec.embeddings.plan import Group

# Tells the draws of stochastic rounding from those of the first weights, which have one coordinate less.
_ROUNDING = counters.tag("stochastic rounding")


class Table(NamedTuple):
    """The arrays of one group; their leading dimension is `Group.array_rows`, D this device's columns of them.

    Attributes:
      weights: `Group.stored` [rows, D]: float32, or the bits of narrower weights.
      slots: The optimizer's rows by name.
      work: What the group's engine keeps from step to step; not part of a checkpoint.
    """

    weights: jax.Array
    slots: dict[str, jax.Array]
    work: jax.Array


class Source(NamedTuple):
    """Where the row of each occurrence is found on this device.

    Attributes:
      vectors: [n, D], as tables store them: the table itself, or rows that came from others.
      slots: int32 [N], of each occurrence a row of `vectors`, or `sentinel`, which means zeros.
      sentinel: A row of zeros, or n, which is none.
    """

    vectors: jax.Array
    slots: jax.Array
    sentinel: int


@dataclasses.dataclass(frozen=True)
class UpdateContext:
    """What an update needs besides gradients.

    Attributes:
      rate: The schedule's factor, which multiplies each group's learning rate.
      step: int32, steps taken before this one.
      seed: Of stochastic rounding, which draws from (seed, step, table, row, column).
      scale: Multiplies every gradient; None: 1.
    """

    rate: jax.Array
    step: jax.Array
    seed: int
    scale: jax.Array | None = None


def numbers(bits: jax.Array, group: Group) -> jax.Array:
    """Returns what the group stores as `bits`, in its type."""
    return jax.lax.bitcast_convert_type(bits, group.dtype)


def learning_rate(group: Group, context: UpdateContext) -> jax.Array:
    """Returns float32 []."""
    return group.tables[0].optimizer.learning_rate * context.rate


def row_mean(group: Group, values: jax.Array) -> jax.Array:
    """Returns the mean over each row's columns, [M, D] -> [M], on whichever devices they are."""
    mean = jnp.mean(values, axis=-1)
    return jax.lax.pmean(mean, "model") if group.column_shards > 1 else mean


def own_columns(group: Group) -> jax.Array:
    """Returns int32 [D], which of a row's columns this device holds."""
    columns = jnp.arange(group.dim // group.column_shards)
    return columns + jax.lax.axis_index("model") * columns.size if group.column_shards > 1 else columns


def tags(group: Group) -> jax.Array:
    """Returns uint32 [tables], the coordinate of each table's name."""
    return jnp.asarray([counters.tag(t.name) for t in group.tables], jnp.uint32)


def rounding_hash(group: Group, rows: jax.Array, context: UpdateContext) -> jax.Array:
    """Returns uint32 [M], the hash of all coordinates but the column, of local rows [M]."""
    shard = jax.lax.axis_index("model") if group.shards > 1 else 0
    table, own_row = group.names(shard * group.shard_rows + rows)
    return counters.bits(context.seed, _ROUNDING, context.step, tags(group)[table], own_row)
