"""How rows and row gradients travel, one pair of functions per strategy. Called inside shard_map.

`gather` turns this device's requested rows into vectors; `collect` brings to each device every gradient of the rows it
holds, from all devices. Over an axis of size 1 both are the identity at trace time.

Shape suffixes: N occurrences of this device's batch, M occurrences that reach this device, C capacity per destination,
D dim. `data` and `model` in a shape are the axes' sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrec.embeddings.merge import IN_BOUNDS
from jaxrec.embeddings.plan import Group
from jaxrec.mesh import AXES


class Route(NamedTuple):
    """Where each occurrence went, kept from the lookup for the update.

    Attributes:
      local: int32 [M], the local rows that other devices (and this one) asked this shard for.
      slot: int32 [N], where in the send buffer each of this device's occurrences stands; empty where nothing is sent.
    """

    local: jax.Array
    slot: jax.Array


def gather_replicated(group: Group, weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, Route]:
    """Looks up rows [N] in the device's own copy; returns vectors [N, D]."""
    del group
    return weights.at[rows].get(mode=IN_BOUNDS), Route(rows, rows[:0])


def collect_replicated(group: Group, route: Route, gradients: jax.Array, axis_sizes: dict[str, int]):
    """All-gathers rows and gradients over all devices: every copy sees the same sum in the same order.

    Bytes sent per device: (devices - 1) * N * (4 + 4 D).
    """
    del group
    return _all_gather(AXES, axis_sizes, route.local, gradients)


def gather_row(group: Group, weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, Route]:
    """Asks the shard that owns each row, over `model`; returns vectors [N, D].

    Shard s owns rows s * shard_rows <= row < (s + 1) * shard_rows of the concatenated tables. Each destination has
    capacity C = N, the worst case, so nothing can overflow. Bytes sent per device: (model - 1) * N * (4 + 4 D).
    """
    n, shards, per_shard = rows.shape[0], group.shards, group.shard_rows
    if shards == 1:
        return gather_replicated(group, weights, rows)
    # The sentinel has no owner; spread its occurrences by position so that they all name a valid destination.
    is_sentinel = rows == group.sentinel
    owner = jnp.where(is_sentinel, 0, rows // per_shard)
    local = jnp.where(is_sentinel, per_shard, rows % per_shard)
    position = jnp.arange(n, dtype=jnp.int32)
    slot = owner * n + position
    send = jnp.full((shards * n,), per_shard, jnp.int32).at[slot].set(local, mode=IN_BOUNDS)
    asked = jax.lax.all_to_all(send, "model", 0, 0, tiled=True)  # [model * C]
    answers = weights.at[asked].get(mode=IN_BOUNDS)
    received = jax.lax.all_to_all(answers, "model", 0, 0, tiled=True)  # [model * C, D]
    return received.at[slot].get(mode=IN_BOUNDS), Route(asked, slot)


def collect_row(group: Group, route: Route, gradients: jax.Array, axis_sizes: dict[str, int]):
    """Sends each gradient to its row's owner over `model`, then gathers over `data`, whose copies stay identical.

    Bytes sent per device: (model - 1) * N * 4 D + (data - 1) * model * N * (4 + 4 D).
    """
    if group.shards > 1:
        send = jnp.zeros((route.local.shape[0], gradients.shape[1]), gradients.dtype)
        send = send.at[route.slot].set(gradients, mode=IN_BOUNDS)
        gradients = jax.lax.all_to_all(send, "model", 0, 0, tiled=True)  # [model * C, D]
    return _all_gather(("data",), axis_sizes, route.local, gradients)


def _all_gather(axes: tuple[str, ...], axis_sizes: dict[str, int], rows: jax.Array, gradients: jax.Array):
    wide = tuple(a for a in axes if axis_sizes[a] > 1)
    if not wide:
        return rows, gradients
    return jax.lax.all_gather(rows, wide, tiled=True), jax.lax.all_gather(gradients, wide, tiled=True)


GATHER = {"replicated": gather_replicated, "row": gather_row}
COLLECT = {"replicated": collect_replicated, "row": collect_row}
