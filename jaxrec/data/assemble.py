"""From rows of block columns to a batch: checks, padding, cutting.

Blocks are packed once: checked, cast, and each row's ids laid side by side in their slots. Batches are then gathered
from packed rows by index, so that a batch costs one `take` of contiguous rows per kind of column, however many
features there are. Packed rows take 4 bytes a slot whatever the bags' lengths: their memory is known beforehand.

Shape suffixes: n rows, S the slots of the features that are stored with the row (all but histories), L the slots of
one feature, A the number of stored bags, and those of `schema`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxrec.checks import UserError, require
from jaxrec.data.schema import Batch, Block, FeatureSpec, HostBatch, Schema

if TYPE_CHECKING:
    from jaxrec.data.timelines import Timelines


class Rows(NamedTuple):
    """Packed rows.

    Attributes:
      ids: int32 [n, S], the slots of every feature but the histories, in the schema's order.
      lengths: int32 [n, A], ids in the slots of each bag.
      cut: int32 [n], ids of the row's bags that did not fit.
      dense: float32 [n, N].
      labels: float32 [n, T].
      weight: float32 [n].
      group: int32 [n].
      position: int32 [n], the events of the group's timeline that the row may see; 0 without histories.
    """

    ids: np.ndarray
    lengths: np.ndarray
    cut: np.ndarray
    dense: np.ndarray
    labels: np.ndarray
    weight: np.ndarray
    group: np.ndarray
    position: np.ndarray

    def part(self, start: int, stop: int) -> Rows:
        """A view of rows start to stop."""
        return Rows(*(array[start:stop] for array in self))


def empty_rows(n: int, schema: Schema) -> Rows:
    """Room for n rows, to be filled by `pack`."""
    stored = [f for f in schema.features if f.kind != "history"]
    return Rows(
        ids=np.empty((n, sum(f.max_length for f in stored)), np.int32),
        lengths=np.empty((n, sum(f.kind == "bag" for f in stored)), np.int32),
        cut=np.empty(n, np.int32),
        dense=np.empty((n, len(schema.dense)), np.float32),
        labels=np.empty((n, len(schema.tasks)), np.float32),
        weight=np.empty(n, np.float32),
        group=np.empty(n, np.int32),
        position=np.empty(n, np.int32),
    )


def pack(block: Block, schema: Schema, where: str, out: Rows) -> None:
    """Checks a block and writes its rows, in their order, to where batches are gathered from.

    Args:
      block: Columns as `schema.Block` describes them.
      schema: What is wanted of them.
      where: The data set and split, for messages.
      out: Room for as many rows as the block has.

    Raises:
      UserError: A column is missing or of the wrong shape, an id is outside its table, a label is neither 0 nor 1, a
        dense value is not finite, a weight is negative or not finite.
    """
    n = len(out.labels)

    def column(name: str, reader: str) -> np.ndarray:
        if name not in block:
            has = ", ".join(sorted(block))
            raise UserError(f"{where}: there is no column {name!r}, which {reader} needs; there are {has}")
        return np.asarray(block[name])

    def shaped(name: str, reader: str, *shape: int) -> np.ndarray:
        array = column(name, reader)
        wanted = (n, *shape)
        require(array.shape == wanted, f"{where}: column {name!r} has shape {array.shape}, but must have {wanted}")
        return array

    def int32(name: str, reader: str, into: np.ndarray) -> None:
        array = shaped(name, reader)
        into[:] = array
        _check(array[:, None], (into == array)[:, None], (name,), "column", "int32", where=where)

    out.labels[:] = shaped("labels", "training", len(schema.tasks))
    _check(out.labels, (out.labels == 0) | (out.labels == 1), schema.tasks, "label", "0 or 1", where=where)
    if schema.dense:
        with np.errstate(over="ignore"):  # a value beyond float32 becomes inf, which the check reports
            out.dense[:] = shaped("dense", "the model", len(schema.dense))
        _check(out.dense, np.isfinite(out.dense), schema.dense, "dense column", "finite", where=where)
    out.weight[:] = shaped("weight", "training") if "weight" in block else 1
    good = np.isfinite(out.weight) & (out.weight >= 0)
    _check(out.weight[:, None], good[:, None], ("weight",), "column", "finite and at least 0", where=where)
    out.group[:] = out.position[:] = 0
    if "group" in block:
        int32("group", "training", out.group)
    histories = [f for f in schema.features if f.kind == "history"]
    if histories:
        int32("position", f"feature {histories[0].name}", out.position)

    out.cut[:] = 0
    slot = bag = 0
    for f in schema.features:
        if f.kind == "categorical":
            ids = shaped(f.source, f"feature {f.name}")
            check_ids(ids, f, schema, where)
            out.ids[:, slot] = ids
        elif f.kind == "bag":
            lengths = shaped(f"{f.source}/lengths", f"feature {f.name}")
            values = column(f.source, f"feature {f.name}")
            total = int(lengths.sum(dtype=np.int64))
            require(
                values.shape == (total,) and (not n or int(lengths.min()) >= 0),
                f"{where}: column {f.source!r} has {values.size} values, but its lengths, of which none may be "
                f"negative, sum to {total}",
            )
            check_ids(values, f, schema, where)
            out.lengths[:, bag] = np.minimum(lengths, f.max_length)
            out.cut[:] += lengths - out.lengths[:, bag]
            pad(values, lengths, out.ids[:, slot : slot + f.max_length])
            bag += 1
        else:
            continue
        slot += f.max_length


def pad(values: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
    """Lays the rows of a ragged column out in slots.

    Args:
      values: [sum of lengths], row after row.
      lengths: int [n], values of each row.
      out: [n, L]; gets the first L values of each row, and zeros after a row's last.
    """
    n, slots = out.shape
    if not len(values):
        out[:] = 0
    elif len(values) == n * slots and (lengths == slots).all():
        out[:] = values.reshape(n, slots)
    else:
        slot = np.arange(slots)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        # A slot past a row's last value reads whatever lies there, and is zeroed.
        padded = values.take(starts[:, None] + slot, mode="clip")
        np.multiply(padded, slot < np.asarray(lengths)[:, None], out=out, casting="unsafe")


def assemble(rows: Rows, index: np.ndarray, schema: Schema, timelines: Timelines | None) -> HostBatch:
    """Gathers a batch.

    Args:
      rows: Packed rows.
      index: int64 [B], which of them, in which order.
      schema: The schema that they were packed by.
      timelines: The groups' events, where the schema has `history` features; their ids are checked already.

    Returns:
      A batch of B rows that shares no memory with `rows`.

    Raises:
      UserError: A row names no owner, or more events than its owner has.
    """
    ids, lengths, cut, dense, labels, weight, group, position = (array.take(index, axis=0) for array in rows)
    if any(f.kind == "history" for f in schema.features):
        assert timelines is not None  # `Batches` refuses such a data set
        stored, stored_lengths = ids, lengths
        ids = np.empty((len(index), schema.slots), np.int32)
        lengths = np.empty((len(index), len(schema.bags)), np.int32)
        slot = bag = from_slot = from_bag = 0
        for f in schema.features:
            here = slice(slot, slot + f.max_length)
            if f.kind == "history":
                ids[:, here], lengths[:, bag] = timelines.cut(group, position, f.source, f.max_length)
            else:
                ids[:, here] = stored[:, from_slot : from_slot + f.max_length]
                from_slot += f.max_length
                if f.kind == "bag":
                    lengths[:, bag] = stored_lengths[:, from_bag]
                    from_bag += 1
            slot += f.max_length
            bag += f.kind != "categorical"
    return HostBatch(Batch(ids, lengths, dense, labels, weight), group, int(cut.sum(dtype=np.int64)))


def stack(parts: Sequence[HostBatch]) -> HostBatch:
    """Puts the rows of several batches one after the other."""
    if len(parts) == 1:
        return parts[0]
    batch = Batch(*(np.concatenate(arrays) for arrays in zip(*(part.batch for part in parts), strict=True)))
    return HostBatch(batch, np.concatenate([part.group for part in parts]), sum(part.truncated for part in parts))


def check_ids(values: np.ndarray, feature: FeatureSpec, schema: Schema, where: str) -> None:
    """Raises `UserError` unless every id of a feature is a row of its table."""
    if not values.size:
        return
    require(
        values.dtype.kind in "iu", f"{where}: feature {feature.name} has values of {values.dtype}, but ids are integers"
    )
    vocabulary = schema.vocabulary[feature.table]
    if values.min() < 0 or values.max() >= vocabulary:
        bad = values[(values < 0) | (values >= vocabulary)].flat[0]
        raise UserError(
            f"{where}: feature {feature.name} holds id {bad}, but table {feature.table} has {vocabulary} rows, "
            f"so ids must be 0 <= id < {vocabulary}"
        )


def _check(
    array: np.ndarray, good: np.ndarray, names: tuple[str, ...], what: str, accepted: str, *, where: str
) -> None:
    """Raises `UserError` for the first of `array` [n, len(names)] that is not `good`."""
    if not good.all():
        row, column = np.argwhere(~good)[0]
        raise UserError(f"{where}: {what} {names[column]} holds {array[row, column]}, but must be {accepted}")
