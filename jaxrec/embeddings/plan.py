"""The run-time layout of the tables: which rows of which array a feature's ids name.

Tables of the same dim, optimizer and sharding share one array (a group), one lookup and one update. The layout exists
at run time only; checkpoints hold one logical array per table (`Group.to_logical`).

Every shard of a group ends with a sentinel row of zeros. Slots past a bag's length, and rows that another shard owns,
name it, so that no lookup needs a mask and every index is in bounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from jaxrec.checks import require
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.embeddings.spec import TableSpec
from jaxrec.optim.sparse import RowRule, row_rule


@dataclasses.dataclass(frozen=True)
class Segment:
    """Features of one group with the same max_length and combiner, pooled by one reduction.

    Attributes:
      features: Names, in the order of their slots.
      length: max_length.
      combiner: `sum`, `mean` or `none`.
      bags: For each feature, its column of `Batch.lengths`; empty for categorical features.
    """

    features: tuple[str, ...]
    length: int
    combiner: str
    bags: tuple[int, ...]

    @property
    def slots(self) -> int:
        return len(self.features) * self.length


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that share an array, and the slots of the batch that read them.

    Attributes:
      name: Unique; made of what the tables share.
      tables: In the order of their rows.
      shards: Over how many devices of the `model` axis the rows are split; 1 where they are replicated.
      columns: The slot columns of `Batch.ids` that read the group, segment by segment.
      slot_tables: For each of `columns`, the index in `tables`.
      segments: How the slots are pooled.
    """

    name: str
    tables: tuple[TableSpec, ...]
    shards: int
    columns: tuple[int, ...]
    slot_tables: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    @property
    def sharding(self) -> str:
        return self.tables[0].sharding

    @functools.cached_property
    def rule(self) -> RowRule:
        return row_rule(self.tables[0].optimizer)

    @property
    def rows(self) -> int:
        """Logical rows of all tables."""
        return sum(t.rows for t in self.tables)

    @property
    def shard_rows(self) -> int:
        """Rows a shard owns, without its sentinel; also the sentinel's local index."""
        return -(-self.rows // self.shards)

    @property
    def array_rows(self) -> int:
        """Rows of the global array, sentinels included."""
        return self.shards * (self.shard_rows + 1)

    @property
    def sentinel(self) -> int:
        """The row of the concatenated tables that means no row."""
        return self.shards * self.shard_rows

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [tables + 1], where each table's rows begin in the concatenation."""
        return np.concatenate([[0], np.cumsum([t.rows for t in self.tables])]).astype(np.int64)

    @property
    def partition(self) -> PartitionSpec:
        """The array's sharding: rows over `model`, or the same on every device."""
        return PartitionSpec("model" if self.sharding == "row" else None)

    def to_logical(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Splits an array [array_rows, ...] into one array [rows, ...] per table, without sentinels."""
        body = array.reshape(self.shards, self.shard_rows + 1, *array.shape[1:])[:, :-1]
        body = body.reshape(self.shards * self.shard_rows, *array.shape[1:])
        return {t.name: body[o : o + t.rows] for t, o in zip(self.tables, self.offsets, strict=False)}

    def from_logical(self, tables: Mapping[str, np.ndarray], fill: float) -> np.ndarray:
        """The inverse of `to_logical`; sentinel and padding rows hold `fill`."""
        first = tables[self.tables[0].name]
        array = np.full((self.shards, self.shard_rows + 1, *first.shape[1:]), fill, first.dtype)
        body = np.full((self.shards * self.shard_rows, *first.shape[1:]), fill, first.dtype)
        for t, o in zip(self.tables, self.offsets, strict=False):
            body[o : o + t.rows] = tables[t.name]
        array[:, :-1] = body.reshape(self.shards, self.shard_rows, *first.shape[1:])
        return array.reshape(self.array_rows, *first.shape[1:])


@dataclasses.dataclass(frozen=True)
class Plan:
    """All groups of a model on one mesh."""

    groups: tuple[Group, ...]

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        return tuple(t for g in self.groups for t in g.tables)

    def describe(self) -> list[str]:
        """One line a group, for the run's log."""
        return [
            f"{g.name}: {len(g.tables)} tables, {g.rows:,} rows x {g.dim}, "
            + (f"rows over {g.shards} shards of model" if g.sharding == "row" else "replicated")
            for g in self.groups
        ]


def make_plan(tables: Sequence[TableSpec], schema: Schema, model_shards: int) -> Plan:
    """Groups `tables` and lays out the schema's slots.

    Args:
      tables: One spec per table of the schema.
      schema: Whose features read them.
      model_shards: Size of the mesh's `model` axis.

    Raises:
      UserError: A group has more rows than int32 can name.
    """
    by_key: dict[tuple, list[TableSpec]] = {}
    for t in tables:
        by_key.setdefault((t.dim, t.optimizer, t.sharding), []).append(t)
    starts = np.cumsum([0, *(f.max_length for f in schema.features)]).tolist()
    first_slot = {f.name: start for f, start in zip(schema.features, starts, strict=False)}
    bag_column = {f.name: i for i, f in enumerate(schema.bags)}
    groups = []
    for number, ((dim, optimizer, sharding), members) in enumerate(by_key.items()):
        index = {t.name: i for i, t in enumerate(members)}
        by_shape: dict[tuple[int, str, bool], list[FeatureSpec]] = {}
        for f in schema.features:
            if f.table in index:
                by_shape.setdefault((f.max_length, f.combiner, f.kind == "categorical"), []).append(f)
        segments, columns, slot_tables = [], [], []
        for (length, combiner, categorical), features in by_shape.items():
            segments.append(
                Segment(
                    tuple(f.name for f in features),
                    length,
                    combiner,
                    () if categorical else tuple(bag_column[f.name] for f in features),
                )
            )
            for f in features:
                columns += range(first_slot[f.name], first_slot[f.name] + length)
                slot_tables += [index[f.table]] * length
        group = Group(
            f"group{number}_dim{dim}_{optimizer.name}_{sharding}",
            tuple(members),
            model_shards if sharding == "row" else 1,
            tuple(columns),
            tuple(slot_tables),
            tuple(segments),
        )
        require(
            group.array_rows < 2**31,
            f"tables {members[0].name}... have {group.rows:,} rows together, but a group holds fewer than 2^31",
        )
        groups.append(group)
    return Plan(tuple(groups))
