"""How rows and row gradients travel, one pair of functions per strategy. Called inside shard_map.

`gather` brings the rows of this device's requested places here; `collect` brings to each device the gradients of the
rows it holds, from all devices. Only distinct rows travel: a device sorts its occurrences, asks for each row once, and
adds up the gradients of a row before it sends them. Buffers have a fixed capacity per destination; a device with more
distinct rows for a destination reports an overflow, and the step is refused. Without peers nothing is sorted and
nothing sent.

Shape suffixes: N occurrences of this device's batch, C capacity per destination, M rows that reach this device, D dim.
In the docstrings' bytes, E is the size of a weight (4, or 2 in narrow tables): vectors travel in the tables' type,
gradients in float32.
`data` and `model` in a shape are the axes' sizes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.embeddings.group_arrays import Source
from jaxrec.embeddings.merge import IN_BOUNDS
from jaxrec.embeddings.plan import Group
from jaxrec.mesh import AXES


class Route(NamedTuple):
    """Where each occurrence went, kept from the lookup for the update.

    Attributes:
      local: int32 [M], the local rows whose gradients `collect` returns (before it gathers over `data`); without peers
        those of all occurrences.
      slot: int32 [N], where in the buffer of distinct rows each occurrence stands; empty where nothing is sent.
      overflow: int32, distinct rows beyond the capacity.
    """

    local: jax.Array
    slot: jax.Array
    overflow: jax.Array

    @property
    def is_exchanged(self) -> bool:
        """Whether rows travel at all; otherwise `collect` has nothing to do."""
        return self.slot.size > 0

    def distinct_rows(self, group: Group) -> int:
        """Returns how many rows this device's gradients are added up to, before `collect`."""
        return self.local.shape[0] // group.column_shards


class Distinct(NamedTuple):
    """The distinct rows of a device's occurrences, by destination.

    Attributes:
      send: int32 [shards * C], local rows; the sentinel where a destination gets fewer than C.
      slot: int32 [N], each occurrence's index in `send`; shards * C for the sentinel and for what did not fit.
      overflow: int32, distinct rows that did not fit.
    """

    send: jax.Array
    slot: jax.Array
    overflow: jax.Array


def capacity_of(group: Group, occurrences: int, measured: int) -> int:
    """Returns C: `measured`, or the worst case where it is 0; never more than the worst case."""
    worst = min(occurrences, group.shard_rows)
    return min(measured, worst) if measured else worst


def distinct(group: Group, places: jax.Array, capacity: int) -> Distinct:
    """Lists each place of [N] once, in the part of the buffer that belongs to its shard."""
    n, shards, per_shard = places.shape[0], group.shards, group.shard_rows
    position = jnp.arange(n, dtype=jnp.int32)
    ordered, origin = jax.lax.sort((places, position), num_keys=1)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]]) & (ordered != group.sentinel)
    number = jnp.cumsum(first.astype(jnp.int32)) - 1  # Which of the distinct rows.
    owner = jnp.minimum(ordered // per_shard, shards)  # The sentinel's is no shard.
    counts = jnp.zeros(shards + 1, jnp.int32).at[owner].add(first.astype(jnp.int32), mode=IN_BOUNDS)
    rank = number - (jnp.cumsum(counts) - counts).at[owner].get(mode=IN_BOUNDS)
    fits = (owner < shards) & (rank < capacity)
    slot = jnp.where(fits, owner * capacity + rank, shards * capacity)
    send = jnp.full(shards * capacity + 1, per_shard, jnp.int32)
    send = send.at[slot].set(jnp.where(fits, ordered % per_shard, per_shard), mode=IN_BOUNDS)[:-1]
    overflow = jnp.sum(jnp.maximum(counts[:shards] - capacity, 0))
    return Distinct(send, jnp.zeros(n, jnp.int32).at[origin].set(slot, mode=IN_BOUNDS), overflow)


def _local(group: Group, weights: jax.Array, places: jax.Array) -> tuple[Source, Route]:
    route = Route(places, places[:0], jnp.zeros((), jnp.int32))
    return Source(weights, places, group.shard_rows), route


def gather_replicated(
    group: Group, weights: jax.Array, places: jax.Array, capacity: int, axis_sizes: dict[str, int]
) -> tuple[Source, Route]:
    """Looks up places [N] in the device's own copy. Nothing is sent."""
    source, route = _local(group, weights, places)
    if math.prod(axis_sizes.values()) > 1:
        d = distinct(group, places, capacity)
        route = Route(d.send, d.slot, d.overflow)
    return source, route


def collect_replicated(group: Group, route: Route, gradients: jax.Array, axis_sizes: dict[str, int]):
    """All-gathers distinct rows and their gradients over all devices: every copy sees the same sum in the same order.

    Bytes received per device: (devices - 1) * C * (4 + 4 D).
    """
    del group
    return _all_gather(AXES, axis_sizes, route.local, gradients)


def gather_row(
    group: Group, weights: jax.Array, places: jax.Array, capacity: int, axis_sizes: dict[str, int]
) -> tuple[Source, Route]:
    """Asks the shard that holds each distinct row of places [N], over `model`. Also for `table`.

    Bytes received per device: (model - 1) * C * (4 + E D).
    """
    if group.shards == 1:
        return gather_replicated(group, weights, places, capacity, axis_sizes)
    d = distinct(group, places, capacity)
    asked = jax.lax.all_to_all(d.send, "model", 0, 0, tiled=True)  # [model * C]
    answers = weights.at[asked].get(mode=IN_BOUNDS)
    received = jax.lax.all_to_all(answers, "model", 0, 0, tiled=True)  # [model * C, D]
    return Source(received, d.slot, received.shape[0]), Route(asked, d.slot, d.overflow)


def collect_row(group: Group, route: Route, gradients: jax.Array, axis_sizes: dict[str, int]):
    """Sends each distinct row's gradient to its shard over `model`, then gathers over `data`: copies stay identical.

    Bytes received per device: (model - 1) * C * 4 D + (data - 1) * model * C * (4 + 4 D).
    """
    if group.shards > 1:
        gradients = jax.lax.all_to_all(gradients, "model", 0, 0, tiled=True)  # [model * C, D]
    return _all_gather(("data",), axis_sizes, route.local, gradients)


def gather_column(
    group: Group, weights: jax.Array, places: jax.Array, capacity: int, axis_sizes: dict[str, int]
) -> tuple[Source, Route]:
    """Asks every device of `model` for its columns of each distinct row of places [N].

    Bytes received per device: (model - 1) * C * (4 + E D / model).
    """
    if math.prod(axis_sizes.values()) == 1:
        return _local(group, weights, places)
    d = distinct(group, places, capacity)
    asked = _all_gather(("model",), axis_sizes, d.send)[0]  # [model * C]
    answers = weights.at[asked].get(mode=IN_BOUNDS)  # [model * C, D / model]
    if group.column_shards > 1:
        # Piece k of the rows goes to the device that asked for them, and comes back as columns.
        answers = jax.lax.all_to_all(answers, "model", 0, 1, tiled=True)  # [C, D]
    return Source(answers, d.slot, answers.shape[0]), Route(asked, d.slot, d.overflow)


def collect_column(group: Group, route: Route, gradients: jax.Array, axis_sizes: dict[str, int]):
    """Sends each distinct row's gradient by columns over `model`, then gathers over `data`.

    Bytes received per device: (model - 1) * C * 4 D / model + (data - 1) * model * C * (4 + 4 D / model).
    """
    if group.column_shards > 1:
        gradients = jax.lax.all_to_all(gradients, "model", 1, 0, tiled=True)  # [model * C, D / model]
    return _all_gather(("data",), axis_sizes, route.local, gradients)


def _all_gather(axes: tuple[str, ...], axis_sizes: dict[str, int], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    wide = tuple(a for a in axes if axis_sizes[a] > 1)
    return tuple(jax.lax.all_gather(a, wide, tiled=True) for a in arrays) if wide else arrays


def exchanged_bytes(group: Group, capacity: int, axis_sizes: dict[str, int], *, training: bool = True) -> int:
    """Returns the bytes that one device receives from others in a step: the docstrings' formulas.

    Args:
      group: The layout.
      capacity: C.
      axis_sizes: Of the mesh.
      training: With the update; else the lookup alone.
    """
    data, model, c, d = axis_sizes["data"], axis_sizes["model"], capacity, group.dim
    if group.sharding == "replicated":
        return (data * model - 1) * c * (4 + 4 * d) if training else 0
    part = d // group.column_shards
    lookup = (model - 1) * c * (4 + group.dtype.itemsize * part)
    update = (model - 1) * c * 4 * part + (data - 1) * model * c * (4 + 4 * part)
    return lookup + update if training else lookup


GATHER = {
    "replicated": gather_replicated,
    "row": gather_row,
    "row_cyclic": gather_row,
    "table": gather_row,
    "column": gather_column,
}
COLLECT = {
    "replicated": collect_replicated,
    "row": collect_row,
    "row_cyclic": collect_row,
    "table": collect_row,
    "column": collect_column,
}
