"""The tables of a model as one pytree, and what a step does with them: look up, merge gradients, propose, check,
commit.

Rows and gradients travel by the strategies of `sharded`; what a device does with its own rows is the work of the
group's engine (`engines`).

Shape suffixes: B rows of this device's batch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrec import counters
from jaxrec import mesh as mesh_lib
from jaxrec.embeddings import engines
from jaxrec.embeddings.group_arrays import Table, UpdateContext, own_columns, tags
from jaxrec.embeddings.lookup import places_of_slots
from jaxrec.embeddings.plan import Group, Plan
from jaxrec.embeddings.sharded import COLLECT, GATHER, Route, capacity_of

Tables = dict[str, Table]


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
    unit = counters.uniform(seed, tags(group)[table][:, None], own_row[:, None], own_columns(group)[None])
    numbers = jnp.where(real[:, None], (2 * unit - 1) * scales[:, None], 0.0).astype(group.dtype)
    weights = jax.lax.bitcast_convert_type(numbers, group.stored)
    slots = {
        name: jnp.full(weights.shape if per_column else weights.shape[:1], group.rule.initial, jnp.float32)
        for name, per_column in group.rule.slots.items()
    }
    return Table(weights, slots, engines.of(group).first_work(group, weights, slots))


def partitions(plan: Plan) -> dict[str, Table]:
    """Returns the PartitionSpec of every array, in the structure of `Tables`."""
    return {g.name: _partitions(g) for g in plan.groups}


def _partitions(group: Group) -> Table:
    slots = {name: group.partition(per_column) for name, per_column in group.rule.slots.items()}
    return Table(group.partition(True), slots, _work_partition(group))  # pyright: ignore[reportArgumentType]


def _work_partition(group: Group) -> PartitionSpec:
    return PartitionSpec("model" if group.shards * group.column_shards > 1 else None)


def shapes(group: Group, mesh: Mesh) -> Table:
    """Returns the abstract arrays of a group."""

    def abstract(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    slots = {
        name: abstract((group.array_rows, group.dim)[: 1 + wide], jnp.float32, group.partition(wide))
        for name, wide in group.rule.slots.items()
    }
    (first, *rest), dtype = engines.of(group).work_shape(group)
    return Table(
        abstract((group.array_rows, group.dim), group.stored, group.partition(True)),  # pyright: ignore[reportArgumentType]
        slots,  # pyright: ignore[reportArgumentType]
        abstract((first * group.shards * group.column_shards, *rest), dtype, _work_partition(group)),  # pyright: ignore[reportArgumentType]
    )


def from_logical(group: Group, mesh: Mesh, arrays: Mapping[str, Mapping[str, np.ndarray]]) -> Table:
    """Returns a group's arrays on the mesh.

    Args:
      group: The layout.
      mesh: Devices.
      arrays: `weights` and each slot -> table -> its rows, as in a checkpoint.
    """

    def load(what: str, fill: float, wide: bool) -> jax.Array:
        stored = group.from_logical(arrays[what], fill)
        return put(stored.view(group.stored) if what == "weights" else stored, mesh, group.partition(wide))

    weights = load("weights", 0.0, True)
    slots = {name: load(name, group.rule.initial, wide) for name, wide in group.rule.slots.items()}
    specs = _partitions(group)
    first_work = jax.shard_map(
        functools.partial(engines.of(group).first_work, group),
        mesh=mesh,
        in_specs=(specs.weights, specs.slots),
        out_specs=specs.work,
        check_vma=False,
    )
    return Table(weights, slots, jax.jit(first_work)(weights, slots))


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
        places_BS = places_of_slots(g, ids, lengths)
        capacity = capacity_of(g, places_BS.size, capacities.get(g.name, 0))
        weights = tables[g.name].weights
        source, routes[g.name] = GATHER[g.sharding](g, weights, places_BS.reshape(-1), capacity, axis_sizes)
        pooled |= engines.of(g).look_up(g, source, lengths)
    return pooled, routes


def merge_gradients(
    plan: Plan,
    tables: Tables,
    routes: Mapping[str, Route],
    gradients: Mapping[str, jax.Array],
    lengths: jax.Array,
    axis_sizes: dict[str, int],
) -> dict[str, Any]:
    """Brings the gradients of the pooled activations to the rows' holders.

    Args:
      plan: The layout.
      tables: This device's shards.
      routes: From `look_up`.
      gradients: Feature -> the gradient of its activations, of the same shape.
      lengths: int32 [B, bags].
      axis_sizes: Of the mesh.

    Returns:
      Group -> what its engine makes of them.
    """
    merged = {}
    for g in plan.groups:
        engine, route, table = engines.of(g), routes[g.name], tables[g.name]
        if route.is_exchanged:
            added = engine.add_up(g, route.slot, gradients, lengths, route.distinct_rows(g))
            merged[g.name] = engine.merge_rows(g, table, *COLLECT[g.sharding](g, route, added, axis_sizes))
        else:
            merged[g.name] = engine.merge_slots(g, table, route.local, gradients, lengths)
    return merged


def squared_norm(plan: Plan, gradients: Mapping[str, Any]) -> jax.Array:
    """Returns the sum of the squares of all row gradients, each row counted once; the same on every device."""
    total = jnp.zeros((), jnp.float32)
    for g in plan.groups:
        local = engines.of(g).squared(g, gradients[g.name])
        split = g.shards > 1 or g.column_shards > 1  # Else every device has all of it.
        total += jax.lax.psum(local, "model") if split else local
    return total


def propose(
    plan: Plan,
    tables: Tables,
    gradients: Mapping[str, Any],
    rate: jax.Array,
    step: jax.Array,
    seed: int,
    scale: jax.Array | None = None,
) -> dict[str, Any]:
    """Prepares each group's update; nothing is written.

    Args:
      plan: The layout.
      tables: This device's shards.
      gradients: From `merge_gradients`.
      rate: The schedule's factor, which multiplies each group's learning rate.
      step: int32, steps taken before this one.
      seed: Of stochastic rounding, which draws from (seed, step, table, row, column).
      scale: Multiplies every gradient.

    Returns:
      Group -> its engine's proposal.
    """
    context = UpdateContext(rate, step, seed, scale)
    return {g.name: engines.of(g).propose(g, tables[g.name], gradients[g.name], context) for g in plan.groups}


class Faults(NamedTuple):
    """What is not finite.

    Attributes:
      features: Feature -> bool, the gradient of its activations.
      groups: Group -> bool, what its update would write.
    """

    features: dict[str, jax.Array]
    groups: dict[str, jax.Array]


def check(plan: Plan, tables: Tables, proposals: Mapping[str, Any], gradients: Mapping[str, jax.Array]) -> Faults:
    """Says whether this device's gradients of activations, and what `commit` would write, are finite."""
    faults = Faults({}, {})
    for g in plan.groups:
        features, faults.groups[g.name] = engines.of(g).check(g, tables[g.name], proposals[g.name], gradients)
        faults.features.update(features)
    return faults


def commit(plan: Plan, tables: Tables, proposals: Mapping[str, Any], ok: jax.Array) -> Tables:
    """Writes the proposals in place where `ok`; otherwise no row changes."""
    return {g.name: engines.of(g).commit(g, tables[g.name], proposals[g.name], ok) for g in plan.groups}


def put(array: np.ndarray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Places a host array on the mesh."""
    return mesh_lib.put(array, NamedSharding(mesh, spec))
