"""What a layout costs: placement, bytes per device, bytes exchanged per step. For `--plan=explain`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from jaxrec.embeddings import engines
from jaxrec.embeddings.plan import Group, Plan
from jaxrec.embeddings.sharded import capacity_of, exchanged_bytes


def device_bytes(group: Group) -> int:
    """Returns what one device holds of a group: weights, optimizer rows and the engine's own, padding included."""
    width = group.dim // group.column_shards
    numbers = sum(width if wide else 1 for wide in group.rule.slots.values())
    shape, dtype = engines.of(group).work_shape(group)
    rows = (width * group.dtype.itemsize + 4 * numbers) * (group.shard_rows + 1)
    return rows + math.prod(shape) * dtype.itemsize


def explain(plan: Plan, batch_size: int, axis_sizes: dict[str, int], capacities: Mapping[str, int]) -> list[str]:
    """Returns the lines that `--plan=explain` prints.

    Args:
      plan: The layout.
      batch_size: Rows of a global batch.
      axis_sizes: Of the mesh.
      capacities: Measured, by group; the worst case for a group that is not there.
    """
    devices = axis_sizes["data"] * axis_sizes["model"]
    lines = [f"plan        mesh data:{axis_sizes['data']},model:{axis_sizes['model']}, batch {batch_size:,}"]
    total, received = 0, 0
    for g in plan.groups:
        occurrences = batch_size // devices * len(g.columns)
        c = capacity_of(g, occurrences, capacities.get(g.name, 0))
        held = device_bytes(g)
        step, lookup = exchanged_bytes(g, c, axis_sizes), exchanged_bytes(g, c, axis_sizes, training=False)
        total, received = total + held, received + step
        lines += [
            g.describe(),
            f"  a device holds {held:,} bytes: weights, optimizer rows, the engine's own",
            f"  a device looks up {occurrences:,} ids a step"
            + (f" and exchanges {c:,} distinct rows with each other one" if step else ""),
            f"  a device receives {step:,} bytes a step: {lookup:,} for the lookup, {step - lookup:,} for the update",
        ]
        shards = g.table_shards or (None,) * len(g.tables)
        for t, shard in zip(g.tables, shards, strict=True):
            where = "" if shard is None else f", on device {shard} of model"
            reason = f" ({plan.reasons[t.name]})" if t.name in plan.reasons else ""
            lines.append(f"  table {t.name}: {t.rows:,} rows{where}{reason}")
    lines.append(f"in all      a device holds {total:,} bytes of tables and receives {received:,} bytes a step")
    return lines
