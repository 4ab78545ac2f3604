"""The run-time layout of the tables: which rows of which array a feature's ids name.

A row has three numbers: its id in its table; its row in the concatenation of the group's tables (id + offset); and its
place, shard * shard_rows + local row. Row and place differ under `row_cyclic` only.

Tables of the same dim, optimizer, sharding and type share one array (a group), one lookup and one update. The layout
exists at run time only; checkpoints hold one logical array per table (`Group.to_logical`).

Every shard of a group ends with a sentinel row of zeros. Slots past a bag's length, and rows that another shard owns,
name it, so that no lookup needs a mask and every index is in bounds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrec.checks import require
from jaxrec.data.schema import FeatureSpec, Schema
from jaxrec.embeddings.spec import TableSpec
from jaxrec.optim.sparse import RowRule, row_rule

# `xla`: XLA's own operations, on any device. `cpu`: the kernel that is compiled when jaxrec is installed.
ENGINES = ("xla", "cpu")


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
      model: Size of the mesh's `model` axis.
      table_shards: Under `table`, the shard of each table, ascending; else empty.
      columns: The slot columns of `Batch.ids` that read the group, segment by segment.
      slot_tables: For each of `columns`, the index in `tables`.
      segments: How the slots are pooled.
      engine: What looks up and updates its rows, one of `ENGINES`.
    """

    name: str
    tables: tuple[TableSpec, ...]
    model: int
    table_shards: tuple[int, ...]
    columns: tuple[int, ...]
    slot_tables: tuple[int, ...]
    segments: tuple[Segment, ...]
    engine: str = "xla"

    @property
    def features(self) -> tuple[str, ...]:
        """Names, in the order in which they are pooled."""
        return tuple(f for s in self.segments for f in s.features)

    @property
    def shards(self) -> int:
        """Over how many devices of the `model` axis the rows are split; 1 where every device has all rows."""
        return 1 if self.sharding in ("replicated", "column") else self.model

    @property
    def dim(self) -> int:
        return self.tables[0].dim

    @property
    def sharding(self) -> str:
        return self.tables[0].sharding

    @property
    def dtype(self) -> np.dtype:
        """Of the weights; the optimizer's rows are float32."""
        return jnp.dtype(self.tables[0].dtype)

    @property
    def stored(self) -> np.dtype:
        """Of the array of weights: float32, or uint16, the bits of narrower ones.

        XLA:CPU gathers, scatters and sends bfloat16 as float32: it would convert whole tables and send twice the bytes.
        """
        return self.dtype if self.dtype == np.float32 else np.dtype(np.uint16)

    @functools.cached_property
    def rule(self) -> RowRule:
        return row_rule(self.tables[0].optimizer)

    @property
    def rows(self) -> int:
        """Logical rows of all tables."""
        return sum(t.rows for t in self.tables)

    @functools.cached_property
    def shard_rows(self) -> int:
        """Rows a shard has room for, without its sentinel; also the sentinel's local index."""
        if self.sharding == "table":
            return max(self._table_loads)
        return -(-self.rows // self.shards)

    @property
    def array_rows(self) -> int:
        """Rows of the global array, sentinels included."""
        return self.shards * (self.shard_rows + 1)

    @property
    def sentinel(self) -> int:
        """The place that means no row."""
        return self.shards * self.shard_rows

    @functools.cached_property
    def _table_loads(self) -> list[int]:
        loads = [0] * self.shards
        for table, shard in zip(self.tables, self.table_shards, strict=True):
            loads[shard] += table.rows
        return loads

    @functools.cached_property
    def offsets(self) -> np.ndarray:
        """int64 [tables], ascending: where each table's rows begin in the concatenation.

        Under `table` the concatenation has gaps: each shard's tables begin at a multiple of `shard_rows`.
        """
        rows = np.array([t.rows for t in self.tables], np.int64)
        before = np.cumsum(rows) - rows
        if self.sharding != "table":
            return before
        shards = np.array(self.table_shards)
        first = np.cumsum(self._table_loads) - self._table_loads
        return shards * self.shard_rows + before - first[shards]

    def place(self, rows: Any) -> Any:
        """Returns where rows of the concatenation stand: shard * shard_rows + local row; integers, NumPy's or JAX's."""
        if self.sharding != "row_cyclic" or self.shards == 1:
            return rows
        run = rows // self.shards
        return (rows % self.shards + self._rotation(run)) % self.shards * self.shard_rows + run

    def unplace(self, places: Any) -> Any:
        """The inverse of `place`; what it returns for padding is at or beyond `rows`, or in a gap."""
        if self.sharding != "row_cyclic" or self.shards == 1:
            return places
        run = places % self.shard_rows
        return run * self.shards + (places // self.shard_rows + self.shards - self._rotation(run)) % self.shards

    def names(self, places: Any) -> tuple[jax.Array, jax.Array]:
        """Returns int32 (index in `tables`, row of that table) of places; for padding the row is beyond the table."""
        row = self.unplace(places)
        offsets = jnp.asarray(self.offsets, jnp.int32)
        table = jnp.clip(jnp.searchsorted(offsets, row, side="right") - 1, 0, len(self.tables) - 1)
        return table, row - offsets[table]

    def _rotation(self, run: Any) -> Any:
        mixed = (run.astype(np.uint32) * np.uint32(0x9E3779B1)) >> np.uint32(16)
        return (mixed % np.uint32(self.shards)).astype(run.dtype)

    @property
    def column_shards(self) -> int:
        """Over how many devices each row's columns are split."""
        return self.model if self.sharding == "column" else 1

    def partition(self, wide: bool) -> PartitionSpec:
        """The sharding of an array with one row per row of the group; `wide`: [rows, D], else [rows]."""
        if self.sharding == "column":
            return PartitionSpec(None, "model") if wide else PartitionSpec(None)
        return PartitionSpec(None if self.sharding == "replicated" else "model")

    def to_logical(self, array: np.ndarray) -> dict[str, np.ndarray]:
        """Splits an array [array_rows, ...] into one array [rows, ...] per table, without sentinels."""
        body = array.reshape(self.shards, self.shard_rows + 1, *array.shape[1:])[:, :-1]
        body = body.reshape(self.shards * self.shard_rows, *array.shape[1:])
        return {t.name: body[self._places(i)] for i, t in enumerate(self.tables)}

    def from_logical(self, tables: Mapping[str, np.ndarray], fill: float) -> np.ndarray:
        """The inverse of `to_logical`; sentinel and padding rows hold `fill`."""
        first = tables[self.tables[0].name]
        array = np.full((self.shards, self.shard_rows + 1, *first.shape[1:]), fill, first.dtype)
        body = np.full((self.shards * self.shard_rows, *first.shape[1:]), fill, first.dtype)
        for i, t in enumerate(self.tables):
            body[self._places(i)] = tables[t.name]
        array[:, :-1] = body.reshape(self.shards, self.shard_rows, *first.shape[1:])
        return array.reshape(self.array_rows, *first.shape[1:])

    def _places(self, table: int) -> Any:
        """Indices of a table's rows among all shards' rows: a slice where they are contiguous."""
        first, rows = int(self.offsets[table]), self.tables[table].rows
        if self.sharding == "row_cyclic" and self.shards > 1:
            return self.place(np.arange(first, first + rows))
        return slice(first, first + rows)

    def describe(self) -> str:
        """Returns in a line what the group is and where its rows are."""
        over = f"{self.model} devices of model"
        full = self.rows / (self.shards * self.shard_rows)
        spread = {
            "replicated": "replicated",
            "row": f"rows over {over}",
            "row_cyclic": f"rows dealt out over {over}",
            "table": f"tables over {over}, {full:.0%} of the room filled",
            "column": f"columns over {over}",
        }[self.sharding]
        return f"{self.name}: {len(self.tables)} tables, {self.rows:,} rows x {self.dim} {self.dtype.name}, {spread}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """All groups of a model on one mesh.

    Attributes:
      groups: The groups.
      reasons: Under `auto`, table -> the sharding that was chosen, and why.
      path: Which engine the groups have, and why, in words.
    """

    groups: tuple[Group, ...]
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    path: str = ""

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        return tuple(t for g in self.groups for t in g.tables)

    @property
    def features(self) -> tuple[str, ...]:
        """Names, in the order in which groups pool them."""
        return tuple(f for g in self.groups for f in g.features)

    def describe(self) -> list[str]:
        """One line a group, for the run's log."""
        return [g.describe() for g in self.groups]


# Under `auto`, tables up to this size are replicated.
REPLICATE_BYTES = 4 << 20


def choose_shardings(vocabulary: Mapping[str, int], row_bytes: int, model: int) -> dict[str, tuple[str, str]]:
    """Returns table -> (sharding, reason) for `auto`.

    A small table costs little memory on every device, and replicated it is looked up without an exchange. Of the
    others, one that alone exceeds a device's fair share must be split, by rows dealt out, so that frequent neighbours
    do not meet on one shard; the rest are placed whole, which balances as well and keeps each feature's ids together.

    Args:
      vocabulary: Rows of each table.
      row_bytes: Of a row's weights and optimizer state.
      model: Devices to split over.
    """
    size = {name: rows * row_bytes for name, rows in vocabulary.items()}
    large = {name: b for name, b in size.items() if b > REPLICATE_BYTES}
    share = sum(large.values()) / model
    chosen = {}
    for name, b in size.items():
        megabytes = f"{b / 2**20:,.1f} MiB"
        if model == 1:
            chosen[name] = ("replicated", "the mesh's model axis is 1")
        elif name not in large:
            chosen[name] = ("replicated", f"{megabytes}, at most {REPLICATE_BYTES >> 20} MiB")
        elif b > share:
            chosen[name] = ("row_cyclic", f"{megabytes}, more than a device's share of {share / 2**20:,.1f} MiB")
        else:
            chosen[name] = ("table", f"{megabytes}, within a device's share of {share / 2**20:,.1f} MiB")
    return chosen


def _balance(tables: Sequence[TableSpec], shards: int) -> list[tuple[TableSpec, int]]:
    """Places whole tables, the largest first, each on the emptiest shard; returns them by shard."""
    loads, placed = [0] * shards, []
    for t in sorted(tables, key=lambda t: (-t.rows, t.name)):
        shard = loads.index(min(loads))
        loads[shard] += t.rows
        placed.append((t, shard))
    return sorted(placed, key=lambda pair: pair[1])


def make_plan(tables: Sequence[TableSpec], schema: Schema, model_shards: int, engine: str = "xla") -> Plan:
    """Groups `tables` and lays out the schema's slots.

    Args:
      tables: One spec per table of the schema.
      schema: Whose features read them.
      model_shards: Size of the mesh's `model` axis.
      engine: Of all groups, one of `ENGINES`.

    Raises:
      UserError: A group has more rows than int32 can name.
    """
    by_key: dict[tuple, list[TableSpec]] = {}
    for t in tables:
        by_key.setdefault((t.dim, t.optimizer, t.sharding, t.dtype), []).append(t)
    starts = np.cumsum([0, *(f.max_length for f in schema.features)]).tolist()
    first_slot = {f.name: start for f, start in zip(schema.features, starts, strict=False)}
    bag_column = {f.name: i for i, f in enumerate(schema.bags)}
    groups = []
    for number, ((dim, optimizer, sharding, dtype), unplaced) in enumerate(by_key.items()):
        placed = _balance(unplaced, model_shards) if sharding == "table" else [(t, -1) for t in unplaced]
        members = tuple(t for t, _ in placed)
        require(
            sharding != "column" or dim % model_shards == 0,
            f"--embedding_sharding=column splits embedding.dim, which is {dim}, over the {model_shards} devices of the "
            "mesh's model axis, but that does not divide it",
        )
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
            f"group{number}_dim{dim}_{optimizer.name}_{sharding}" + ("" if dtype == "float32" else f"_{dtype}"),
            members,
            model_shards,
            tuple(shard for _, shard in placed if shard >= 0),
            tuple(columns),
            tuple(slot_tables),
            tuple(segments),
            engine,
        )
        require(
            group.array_rows < 2**31,
            f"tables {members[0].name}... have {group.rows:,} rows together, but a group holds fewer than 2^31",
        )
        groups.append(group)
    return Plan(tuple(groups))
