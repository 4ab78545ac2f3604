"""How evenly a layout spreads rows, and how much of an exchange's room a batch uses. NumPy over a plan's places.

Shape suffixes: P devices of the mesh, S shards of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxrec.data.schema import Batch
from jaxrec.embeddings.lookup import places_of_slots
from jaxrec.embeddings.plan import Group, Plan


class Asked(NamedTuple):
    """What one batch asks of the holders of rows.

    Attributes:
      ids: Ids looked up, repetitions counted, at the heaviest holder over the mean holder.
      rows: Rows that are asked for, each once by each device, likewise.
      filled: Share of the exchange's room that these rows take.
      fullest: The most rows of a device for one destination, over the room for it.
    """

    ids: float
    rows: float
    filled: float
    fullest: float


def heaviest_over_mean(loads: np.ndarray) -> float:
    """Returns the largest load over the mean load; 1 where nothing is there to be spread."""
    return float(loads.max() / loads.mean()) if loads.any() else 1.0


def rows_held(plan: Plan) -> np.ndarray:
    """Returns int64 [model]: the rows that each device of `model` holds of tables that are split by rows."""
    groups = [g for g in plan.groups if g.shards > 1]
    held = [np.zeros(plan.groups[0].model, np.int64)]
    for g in groups:
        rows = np.concatenate([first + np.arange(t.rows) for first, t in zip(g.offsets, g.tables, strict=True)])
        held.append(np.bincount(g.place(rows) // g.shard_rows, minlength=g.shards))
    return np.sum(held, axis=0)


def asked(plan: Plan, batch: Batch, axis_sizes: Mapping[str, int], capacities: Mapping[str, int]) -> Asked:
    """Returns what a global batch asks.

    Only groups whose rows are split have holders that can be uneven; every group that is exchanged has room. Each
    group of `model` devices is asked by its own devices alone, so the holders are all devices of the mesh.

    Args:
      plan: The layout.
      batch: On the host.
      axis_sizes: Of the mesh.
      capacities: Group -> rows that a device has room for, for each destination.
    """
    data, model = axis_sizes["data"], axis_sizes["model"]
    ids, rows = np.zeros((data, model)), np.zeros((data, model))
    taken = room = fullest = 0.0
    for g in plan.groups:
        occurring, distinct = _by_destination(g, batch, data * model)
        if g.shards > 1:
            ids += occurring.reshape(data, model, model).sum(axis=1)
            rows += distinct.reshape(data, model, model).sum(axis=1)
        taken += distinct.sum()
        room += distinct.size * capacities[g.name]
        fullest = max(fullest, distinct.max() / capacities[g.name])
    return Asked(heaviest_over_mean(ids), heaviest_over_mean(rows), taken / room, fullest)


def _by_destination(group: Group, batch: Batch, devices: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the occurrences and the distinct rows of each device's part of a batch, by shard: int64 [P, S] each."""
    places = np.asarray(places_of_slots(group, np.asarray(batch.ids), np.asarray(batch.lengths)))  # pyright: ignore
    occurring, distinct = [], []
    for part in np.split(places, devices):
        real = part[part != group.sentinel]
        for found, which in ((occurring, real), (distinct, np.unique(real))):
            found.append(np.bincount(which // group.shard_rows, minlength=group.shards))
    return np.array(occurring), np.array(distinct)
