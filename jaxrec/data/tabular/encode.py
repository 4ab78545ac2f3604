"""From the parts of a table to the blocks of a prepared data set.

Three passes over the parts: training rows are counted (vocabularies, means), held-out rows are compared with them (what
training never saw), and rows are encoded. Memory holds the vocabularies, a few parts, and, where there are
histories, the events.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxrec.checks import require
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.blocks import BLOCK_ROWS, Column, Facts
from jaxrec.data.schema import Block, FeatureSpec
from jaxrec.data.tabular import splits
from jaxrec.data.tabular.convert import Part
from jaxrec.data.tabular.files import TableFile
from jaxrec.data.tabular.parts import Made, in_threads, load
from jaxrec.data.tabular.schema import SPLITS, TableSchema
from jaxrec.data.tabular.vocabulary import EMPTY_KEY, Counts, Vocabulary, hashed
from jaxrec.data.timelines import Timelines

# Distinct values that the counts of all tables hold in memory: a quarter of a gigabyte, and twice that while merging.
COUNTED_IN_MEMORY = 1 << 24


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What `block_writer.prepare` takes.

    Attributes:
      facts: Of the data set.
      columns: Of its blocks.
      splits: By name, rows and blocks.
      timelines: Of the training events, where there are histories.
    """

    facts: Facts
    columns: dict[str, Column]
    splits: dict[str, tuple[int, Iterator[Block]]]
    timelines: Timelines | None


def encode(
    parts: Sequence[Made],
    files: Sequence[TableFile],
    schema: TableSchema,
    version: str,
    source: str,
    scratch: Path,
    *,
    threads: int,
) -> Encoded:
    """Counts, then returns the blocks, which are encoded as they are asked for.

    Args:
      parts: Of the table, in order.
      files: That they are of.
      schema: What the columns are for.
      version: Of the data set.
      source: For the data set's facts.
      scratch: A folder for counts that do not fit in memory.
      threads: That load parts.

    Raises:
      UserError: A split has no rows, a part is damaged, or a label of the training split has one class only.
    """
    encoder = _Encoder(parts, files, schema, scratch, threads)
    encoder.count()
    unseen = encoder.unseen()
    timelines = encoder.timelines() if any(c.history for c in schema.columns) else None
    facts = Facts(
        name=schema.name,
        version=version,
        source=source,
        vocabulary={table: encoder.rows_of(table) for table in schema.tables},
        dense=tuple(c.name for c in schema.of("dense")),
        labels=tuple(c.name for c in schema.of("label")),
        auxiliary=tuple(c.name for c in schema.of("auxiliary")),
        longest=encoder.longest,
        block_rows=BLOCK_ROWS,
        features=features(schema),
        unseen=unseen,
    )
    blocks = {name: (encoder.rows[s], encoder.blocks(s)) for s, name in enumerate(SPLITS)}
    return Encoded(facts, encoder.described(), blocks, timelines)


def features(schema: TableSchema) -> tuple[FeatureSpec, ...]:
    """Returns the features that a model sees."""
    specs = []
    for c in schema.of("categorical", "bag"):
        if "bag" in c.use:
            specs.append(FeatureSpec(c.name, "bag", c.table, c.combiner, c.max_length, column=block_column(c.name)))
            continue
        specs.append(FeatureSpec(c.name, "categorical", c.table, column=block_column(c.name)))
        if c.history:
            history = f"{c.name}_history"
            specs.append(FeatureSpec(history, "history", c.table, c.combiner, c.history, column=block_column(c.name)))
    return tuple(specs)


def block_column(name: str) -> str:
    """Returns where blocks hold the ids of a table's column: it may be named as a block's own columns are."""
    return f"{name}/ids"


class _Encoder:
    def __init__(
        self, parts: Sequence[Made], files: Sequence[TableFile], schema: TableSchema, scratch: Path, threads: int
    ):
        self.schema, self._parts, self._threads = schema, parts, threads
        self._user = next((c.name for c in schema.of("user")), "")
        times = None
        if schema.split.by == "time":
            of_parts = [part.time for _, part in self._loaded(range(len(parts)))]
            times = np.concatenate([t for t in of_parts if t is not None] or [np.empty(0, np.int64)])
        self._assigned = splits.assign(schema.split, parts, [f.split for f in files], self._user, times)
        self._scratch = scratch
        self.rows = [0] * len(SPLITS)
        self._rows_of_part: list[np.ndarray] = []
        self.longest: dict[str, int] = {}
        self._vocabularies: dict[str, Vocabulary] = {}
        self._users = Vocabulary(np.empty(0, np.uint64), np.empty(0, np.int32))
        self._seen: dict[str, np.ndarray] = {}
        self._history: _History | None = None
        standard = [i for i, c in enumerate(schema.of("dense")) if c.transform == "standard"]
        self._standard = standard
        self._mean, self._deviation = np.zeros(len(standard)), np.ones(len(standard))

    def _loaded(self, indices: Sequence[int]) -> Iterator[tuple[int, Part]]:
        return in_threads(lambda i: (i, load(self._parts[i])), indices, self._threads)

    def count(self) -> None:
        """Counts the rows of each split, and on the training split what encoding needs."""
        room = max(COUNTED_IN_MEMORY // max(len(self.schema.tables) + 1, 1), 1)
        counts = {table: Counts(self._scratch, f"counts-{i}", room) for i, table in enumerate(self.schema.tables)}
        users = Counts(self._scratch, "users", room)
        self._seen = {
            t: np.zeros(columns[0].ids.max_rows, bool)
            for t, columns in self.schema.tables.items()
            if columns[0].ids.vocabulary == "hash"
        }
        moments = _Moments(len(self._standard))
        label_sums, weights = np.zeros(len(self.schema.of("label"))), np.zeros(len(SPLITS))

        def counted(i: int):
            part = load(self._parts[i])
            split = self._assigned(i, part)
            train = split == splits.TRAIN
            by_column = {}
            for c in self.schema.of("categorical", "bag"):
                values = part.values[c.name]
                used = train if values.lengths is None else np.repeat(train, values.lengths)
                by_column[c.name] = np.bincount(values.codes[used], minlength=len(values.keys))
            return part, split, train, by_column

        for part, split, train, by_column in in_threads(counted, range(len(self._parts)), self._threads):
            self._rows_of_part.append(np.bincount(split, minlength=len(SPLITS)))
            for table, columns in self.schema.tables.items():
                for c in columns:
                    keys, times = part.values[c.name].keys, by_column[c.name]
                    there = times > 0
                    if table in self._seen:
                        self._seen[table][hashed(keys[there], c.ids.max_rows)] = True
                    else:
                        counts[table].add(keys[there], times[there])
            for c in self.schema.of("bag"):
                lengths = part.values[c.name].lengths
                assert lengths is not None
                column = block_column(c.name)
                self.longest[column] = max(self.longest.get(column, 0), int(lengths.max(initial=0)))
            if self._user:
                values = part.values[self._user]
                users.add(values.keys, np.bincount(values.codes, minlength=len(values.keys)))
            moments.add(part.dense[train][:, self._standard])
            # A row of weight 0 does not count.
            weight = np.ones(part.rows) if part.weight is None else (part.weight > 0).astype(np.float64)
            weights += np.bincount(split, weight, minlength=len(SPLITS))
            label_sums += weight[train] @ part.labels[train, : len(label_sums)].astype(np.float64)
        self.rows = np.sum(self._rows_of_part or [np.zeros(len(SPLITS), int)], axis=0).tolist()
        splits.check(self.rows, self.schema.split, f"data set {self.schema.name}")
        for name, weight in zip(SPLITS, weights.tolist(), strict=True):
            require(weight > 0, f"data set {self.schema.name}: all rows of split {name} have weight 0")
        for c, positive in zip(self.schema.of("label"), label_sums.tolist(), strict=True):
            which = "" if c.positive is None else f" (its text is {c.positive!r} in all or none)"
            require(
                0 < positive < weights[splits.TRAIN],
                f"data set {self.schema.name}: label {c.name} is {int(positive > 0)}{which} in all "
                f"{self.rows[splits.TRAIN]:,} training rows: there is nothing to learn; choose another split or label",
            )
        for table, columns in self.schema.tables.items():
            if table not in self._seen:
                ids = columns[0].ids
                self._vocabularies[table] = counts[table].vocabulary(ids.min_count, ids.max_rows - 1)
        if self._user:
            self._users = users.vocabulary(1, 2**31 - 2)
        self._mean, self._deviation = moments.finish()

    def rows_of(self, table: str) -> int:
        """Rows of an embedding table."""
        return len(self._seen[table]) if table in self._seen else self._vocabularies[table].rows

    def _ids(self, part: Part, column: str, table: str) -> np.ndarray:
        values = part.values[column]
        of_key = (
            hashed(values.keys, self.rows_of(table))
            if table in self._seen
            else self._vocabularies[table].look_up(values.keys)
        )
        return of_key[values.codes]

    def unseen(self) -> dict[str, dict[str, int]]:
        """Counts, by split and feature, the held-out values that have no row that training updates for them alone.

        With a vocabulary these are the values of row 0; with hashes, those whose row no training value has.
        """
        unseen = {
            SPLITS[s]: dict.fromkeys((c.name for c in self.schema.of("categorical", "bag")), 0)
            for s in (splits.VALIDATION, splits.TEST)
        }
        held = [i for i, rows in enumerate(self._rows_of_part) if rows[1:].any()]
        for i, part in self._loaded(held):
            split = self._assigned(i, part)
            for c in self.schema.of("categorical", "bag"):
                ids = self._ids(part, c.name, c.table)
                new = ~self._seen[c.table][ids] if c.table in self._seen else ids == 0
                lengths = part.values[c.name].lengths
                of_value = split if lengths is None else np.repeat(split, lengths)
                for s in (splits.VALIDATION, splits.TEST):
                    unseen[SPLITS[s]][c.name] += int(np.count_nonzero(new & (of_value == s)))
        return unseen

    def timelines(self) -> Timelines:
        """Returns the training events of every user, in the order of time.

        Rows of no user (an empty field) are nobody's history, and have none.
        """
        nobody = self._users.look_up(np.array([EMPTY_KEY]))[0] - 1
        owners, times, columns = [], [], {block_column(c.name): [] for c in self.schema.columns if c.history}
        train = [i for i, rows in enumerate(self._rows_of_part) if rows[splits.TRAIN]]
        for i, part in self._loaded(train):
            group = self._group(part)
            used = (self._assigned(i, part) == splits.TRAIN) & (group != nobody)
            assert part.time is not None
            owners.append(group[used])
            times.append(part.time[used])
            for c in self.schema.columns:
                if c.history:
                    columns[block_column(c.name)].append(self._ids(part, c.name, c.table)[used])
        owner, time = np.concatenate(owners), np.concatenate(times)
        self._history = _History(owner, time)
        order = self._history.order
        counts = np.bincount(owner, minlength=len(self._users.keys))
        events = {name: np.concatenate(values)[order] for name, values in columns.items()}
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Timelines(offsets, {**events, "timestamp": time[order]}, self.schema.name)

    def _group(self, part: Part) -> np.ndarray:
        values = part.values[self._user]
        return (self._users.look_up(values.keys) - 1)[values.codes].astype(np.int32)

    def columns(self, i: int, part: Part, s: int) -> dict[str, np.ndarray]:
        """Encodes the rows of a part that are of split `s`."""
        rows = np.flatnonzero(self._assigned(i, part) == s)
        dense = part.dense[rows].copy()
        for j, column in enumerate(self._standard):
            dense[:, column] = (dense[:, column] - self._mean[j]) / self._deviation[j]
        dense[np.isnan(dense)] = 0
        columns: dict[str, np.ndarray] = {"labels": part.labels[rows]}
        if dense.shape[1]:
            columns["dense"] = dense
        for name in ("weight", "time"):
            if (values := getattr(part, name)) is not None:
                columns["timestamp" if name == "time" else name] = values[rows]
        if self._user:
            columns["group"] = self._group(part)[rows]
        if self._history is not None:
            assert part.time is not None
            columns["position"] = self._history.before(columns["group"], part.time[rows])
        for c in self.schema.of("categorical", "bag"):
            ids, lengths = self._ids(part, c.name, c.table), part.values[c.name].lengths
            name = block_column(c.name)
            if lengths is None:
                columns[name] = ids[rows]
                continue
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            kept = lengths[rows]
            within = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
            columns[name] = ids[np.repeat(starts[rows], kept) + within]
            columns[f"{name}/lengths"] = kept
        return columns

    def described(self) -> dict[str, Column]:
        """Returns the columns of every block."""
        columns = {"labels": Column("float32", (len(self.schema.of("label", "auxiliary")),))}
        if dense := self.schema.of("dense"):
            columns["dense"] = Column("float32", (len(dense),))
        if self.schema.of("weight"):
            columns["weight"] = Column("float32")
        if self.schema.of("time"):
            columns["timestamp"] = Column("int64")
        if self._user:
            columns["group"] = Column("int32")
        if self._history is not None:
            columns["position"] = Column("int32")
        for c in self.schema.of("categorical", "bag"):
            columns[block_column(c.name)] = Column("int32", bag="bag" in c.use)
            if "bag" in c.use:
                columns[f"{block_column(c.name)}/lengths"] = Column("int32")
        return columns

    def blocks(self, s: int) -> Iterator[Block]:
        """Yields the blocks of split `s`, in the order of the table's rows."""
        having = [i for i, rows in enumerate(self._rows_of_part) if rows[s]]
        encoded = in_threads(lambda i: self.columns(i, load(self._parts[i]), s), having, self._threads)
        waiting: dict[str, np.ndarray] | None = None
        for columns in encoded:
            joined = columns if waiting is None else {n: np.concatenate([waiting[n], columns[n]]) for n in columns}
            table = ArrayBlocks(joined, BLOCK_ROWS)
            whole = table.rows // BLOCK_ROWS
            yield from map(table.__getitem__, range(whole))
            waiting = dict(table[whole]) if table.rows % BLOCK_ROWS else None
        if waiting is not None:
            yield waiting


class _Moments:
    """Mean and deviation of columns, from sums about the first rows' mean, so that large values lose no digits."""

    def __init__(self, columns: int):
        self._about: np.ndarray | None = None
        self._sums = np.zeros((3, columns))

    def add(self, rows: np.ndarray) -> None:
        """Adds rows, [n, columns]; NaN is left out."""
        if not rows.size:
            return
        values = rows.astype(np.float64)
        there = ~np.isnan(values)
        if self._about is None:
            self._about = np.where(there, values, 0).sum(0) / np.maximum(there.sum(0), 1)
        values = np.where(there, values - np.asarray(self._about), 0)
        self._sums += [there.sum(0), values.sum(0), (values**2).sum(0)]

    def finish(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the means, and the deviations (1 where all values are equal)."""
        count, first, second = self._sums
        mean = first / np.maximum(count, 1)
        deviation = np.sqrt(np.maximum(second / np.maximum(count, 1) - mean**2, 0))
        about = np.zeros_like(mean) if self._about is None else self._about
        return about + mean, np.where(deviation > 1e-12 * np.maximum(np.abs(about + mean), 1), deviation, 1)


class _History:
    """Where a time lies among an owner's events."""

    def __init__(self, owner: np.ndarray, time: np.ndarray):
        self._times = np.unique(time)
        keys = self._keys(owner, np.searchsorted(self._times, time))
        self.order = np.argsort(keys, kind="stable")
        self._sorted = keys[self.order]

    def _keys(self, owner: np.ndarray, rank: np.ndarray) -> np.ndarray:
        # Owners are fewer than 2^31, and so are times, or memory would not hold them.
        return owner.astype(np.int64) * (len(self._times) + 1) + rank

    def before(self, owner: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Returns, int32 [n], the owner's events of a strictly earlier time."""
        rank = np.searchsorted(self._times, time)
        find = functools.partial(np.searchsorted, self._sorted)
        return (find(self._keys(owner, rank)) - find(self._keys(owner, np.zeros_like(rank)))).astype(np.int32)
