"""The tables of a model as one pytree, and what a step does with them: look up, merge gradients, propose,
commit.

Shape suffixes: B rows of this device's batch, N occurrences of this device, M occurrences that reach this device,
D dim.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec import counters
from jaxrec import mesh as mesh_lib
from jaxrec.embeddings import lookup as local_lookup
from jaxrec.embeddings.merge import IN_BOUNDS, merge
from jaxrec.embeddings.plan import Group, Plan
from jaxrec.embeddings.sharded import COLLECT, GATHER, Route, capacity_of
from jaxrec.optim.row_rule import Context
from jaxrec.rounding import stochastic

# Tells the draws of stochastic rounding from those of the first weights, which have one coordinate less.
_ROUNDING = counters.tag("stochastic rounding")


class Table(NamedTuple):
    """The arrays of one group; their leading dimension is `Group.array_rows`, D this device's columns of them.

    Attributes:
      weights: `Group.stored` [rows, D]: float32, or the bits of narrower weights.
      slots: The optimizer's rows by name.
      scratch: int32 [rows], for merging; not part of a checkpoint.
    """

    weights: jax.Array
    slots: dict[str, jax.Array]
    scratch: jax.Array


Tables = dict[str, Table]


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


def initialise(plan: Plan, mesh: Mesh, seed: int) -> Tables:
    """Returns new tables on the mesh; a weight depends on (seed, table, row, column) only, so on no layout."""
    return {
        g.name: jax.jit(
            jax.shard_map(
                lambda g=g: _initial_shard(g, seed),
                mesh=mesh,
                in_specs=(),
                out_specs=_partitions(g),
                check_vma=False,
            )
        )()
        for g in plan.groups
    }


def _initial_shard(group: Group, seed: int) -> Table:
    shard = jax.lax.axis_index("model") if group.shards > 1 else 0
    local = jnp.arange(group.shard_rows + 1, dtype=jnp.int32)
    table, own_row = group.names(shard * group.shard_rows + local)
    scales = jnp.asarray([t.init_scale for t in group.tables], jnp.float32)[table]
    # The rest is padding: the sentinel, the end of the last shard, and under `table` the end of any.
    real = (local < group.shard_rows) & (own_row < jnp.asarray([t.rows for t in group.tables], jnp.int32)[table])
    unit = counters.uniform(seed, _tags(group)[table][:, None], own_row[:, None], _columns(group)[None])
    weights = _bits(jnp.where(real[:, None], (2 * unit - 1) * scales[:, None], 0.0).astype(group.dtype), group)
    slots = {
        name: jnp.full(weights.shape if per_column else weights.shape[:1], group.rule.initial, jnp.float32)
        for name, per_column in group.rule.slots.items()
    }
    return Table(weights, slots, jnp.zeros(weights.shape[:1], jnp.int32))


def _tags(group: Group) -> jax.Array:
    """Returns uint32 [tables], the coordinate of each table's name."""
    return jnp.asarray([counters.tag(t.name) for t in group.tables], jnp.uint32)


def _columns(group: Group) -> jax.Array:
    """Returns int32 [D], which of a row's columns this device holds."""
    columns = jnp.arange(group.dim // group.column_shards)
    return columns + jax.lax.axis_index("model") * columns.size if group.column_shards > 1 else columns


def partitions(plan: Plan) -> dict[str, Table]:
    """Returns the PartitionSpec of every array, in the structure of `Tables`."""
    return {g.name: _partitions(g) for g in plan.groups}


def _partitions(group: Group) -> Table:
    slots = {name: group.partition(per_column) for name, per_column in group.rule.slots.items()}
    return Table(group.partition(True), slots, group.partition(False))  # pyright: ignore[reportArgumentType]


def look_up(
    plan: Plan,
    tables: Tables,
    ids: jax.Array,
    lengths: jax.Array,
    axis_sizes: dict[str, int],
    capacities: Mapping[str, int] = types.MappingProxyType({}),
) -> tuple[dict[str, jax.Array], dict[str, Route]]:
    """Looks up and pools every feature.

    Args:
      plan: The layout.
      tables: This device's shards.
      ids: int32 [B, K], range-checked by the host.
      lengths: int32 [B, bags].
      axis_sizes: Of the mesh.
      capacities: Group -> rows that a device may send to another; the worst case for a group that is not there.

    Returns:
      Feature -> float32 [B, D] (or [B, L, D] for the combiner `none`), and what the update needs to know.
    """
    pooled, routes = {}, {}
    for g in plan.groups:
        places_BS = local_lookup.places_of_slots(g, ids, lengths)
        capacity = capacity_of(g, places_BS.size, capacities.get(g.name, 0))
        vectors, routes[g.name] = GATHER[g.sharding](
            g, tables[g.name].weights, places_BS.reshape(-1), capacity, axis_sizes
        )
        vectors = _numbers(vectors, g).astype(jnp.float32).reshape(*places_BS.shape, g.dim)
        pooled |= local_lookup.pool(g, vectors, lengths)
    return pooled, routes


def merge_gradients(
    plan: Plan,
    tables: Tables,
    routes: Mapping[str, Route],
    gradients: Mapping[str, jax.Array],
    lengths: jax.Array,
    axis_sizes: dict[str, int],
) -> dict[str, RowGradients]:
    """Brings the gradients of the pooled activations to the rows' holders, one sum per distinct row.

    Args:
      plan: The layout.
      tables: This device's shards.
      routes: From `look_up`.
      gradients: Feature -> the gradient of its activations, of the same shape.
      lengths: int32 [B, bags].
      axis_sizes: Of the mesh.
    """
    merged_gradients = {}
    for g in plan.groups:
        spread = local_lookup.spread(g, gradients, lengths).reshape(-1, g.dim)
        rows, row_gradients = COLLECT[g.sharding](g, routes[g.name], spread, axis_sizes)
        merged = merge(rows, row_gradients, tables[g.name].scratch)
        write = merged.first & (rows != g.shard_rows)
        # Everything that is not written is sent to the sentinel with gradient 0, whose update is the identity.
        merged_gradients[g.name] = RowGradients(
            jnp.where(write, rows, g.shard_rows), jnp.where(write[:, None], merged.gradient, 0.0), merged.scratch
        )
    return merged_gradients


def squared_norm(plan: Plan, gradients: Mapping[str, RowGradients]) -> jax.Array:
    """Returns the sum of the squares of all row gradients, each row counted once; the same on every device."""
    total = jnp.zeros((), jnp.float32)
    for g in plan.groups:
        local = jnp.sum(jnp.square(gradients[g.name].gradient))
        split = g.shards > 1 or g.column_shards > 1  # Else every device has all of it.
        total += jax.lax.psum(local, "model") if split else local
    return total


def propose(
    plan: Plan,
    tables: Tables,
    gradients: Mapping[str, RowGradients],
    rate: jax.Array,
    step: jax.Array,
    seed: int,
    scale: jax.Array | None = None,
) -> dict[str, Proposal]:
    """Computes each group's update.

    Args:
      plan: The layout.
      tables: This device's shards.
      gradients: From `merge_gradients`.
      rate: The schedule's factor, which multiplies each group's learning rate.
      step: int32, steps taken before this one.
      seed: Of stochastic rounding, which draws from (seed, step, table, row, column).
      scale: Multiplies every gradient.
    """
    proposals = {}
    for g in plan.groups:
        table, optimizer = tables[g.name], g.tables[0].optimizer
        rows, gradient, scratch = gradients[g.name]
        if scale is not None:
            gradient *= scale
        old = {name: s.at[rows].get(mode=IN_BOUNDS) for name, s in table.slots.items()}
        learning_rate = optimizer.learning_rate * rate
        delta, slots = g.rule.update(gradient, old, Context(learning_rate, step, functools.partial(_row_mean, g)))
        narrow = g.dtype != g.stored
        if optimizer.weight_decay or narrow:
            weights = _numbers(table.weights.at[rows].get(mode=IN_BOUNDS), g).astype(jnp.float32)
            delta -= learning_rate * optimizer.weight_decay * weights
            if narrow:
                delta = _round(g, rows, weights + delta, seed, step)
        proposals[g.name] = Proposal(rows, delta, slots, scratch)
    return proposals


def _bits(weights: jax.Array, group: Group) -> jax.Array:
    """Returns weights as the group's tables store them."""
    return jax.lax.bitcast_convert_type(weights, group.stored)


def _numbers(bits: jax.Array, group: Group) -> jax.Array:
    """The inverse of `_bits`."""
    return jax.lax.bitcast_convert_type(bits, group.dtype)


def _round(group: Group, rows: jax.Array, weights: jax.Array, seed: int, step: jax.Array) -> jax.Array:
    """Rounds float32 weights [M, D] of local rows [M] to the group's type."""
    shard = jax.lax.axis_index("model") if group.shards > 1 else 0
    table, own_row = group.names(shard * group.shard_rows + rows)
    coordinates = (_tags(group)[table][:, None], own_row[:, None], _columns(group)[None])
    # The sentinel's 0 is a value of every type, so that its draw, some row's own, does not matter.
    return stochastic(weights, group.dtype, counters.bits(seed, _ROUNDING, step, *coordinates))


def _row_mean(group: Group, values: jax.Array) -> jax.Array:
    """Returns the mean over each row's columns, [M, D] -> [M], on whichever devices they are."""
    mean = jnp.mean(values, axis=-1)
    return jax.lax.pmean(mean, "model") if group.column_shards > 1 else mean


def commit(plan: Plan, tables: Tables, proposals: Mapping[str, Proposal], ok: jax.Array) -> Tables:
    """Writes the proposals in place where `ok`; otherwise only the sentinels are rewritten with what they hold."""
    written = {}
    for g in plan.groups:
        table, p = tables[g.name], proposals[g.name]
        rows = jnp.where(ok, p.rows, g.shard_rows)
        change, at = _bits(jnp.where(ok, p.weights, jnp.zeros_like(p.weights)), g), table.weights.at[rows]
        weights = at.add(change, mode=IN_BOUNDS) if g.dtype == g.stored else at.set(change, mode=IN_BOUNDS)
        slots = {
            name: s.at[rows].set(jnp.where(ok, p.slots[name], g.rule.initial), mode=IN_BOUNDS)
            for name, s in table.slots.items()
        }
        written[g.name] = Table(weights, slots, p.scratch)
    return written


def put(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Places a host array on the mesh."""
    return mesh_lib.put(array, NamedSharding(mesh, spec))
