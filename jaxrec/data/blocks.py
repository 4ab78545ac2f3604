"""Prepared data sets: columnar blocks of rows on disk, which `block_writer` has written.

    <data_dir>/<name>-<version>/
      manifest.json    what the folder holds; its presence says that the preparation was completed
      rows/<version>/        TFDS data set: a split per split, a record per block of rows
      timelines/<version>/   TFDS data set: one split, `events`, a record per block of events, in the owners' order

Both are ordinary TFDS data sets (`tfds.builder_from_directory(folder).as_data_source()`). Training reads their
array_record files directly: TFDS takes longer to import and to decode, and knows neither the sizes nor the digests.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.checks import UserError, import_package
from jaxrec.data.schema import Block, FeatureSpec
from jaxrec.data.timelines import Timelines

FORMAT = 1
BLOCK_ROWS = 8192
OWNER = "owner"  # the column of `timelines/` that says whose event it is


@dataclasses.dataclass(frozen=True)
class Column:
    """What a column holds.

    Attributes:
      dtype: NumPy's name of it.
      shape: Of one row (of one value, for a bag).
      bag: Whether a row holds several values: these lie flat in the column, their counts in column `<name>/lengths`.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    bag: bool = False


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a prepared data set says of itself, beside its columns.

    Attributes:
      name: The data set's.
      version: `major.minor.patch`; raised whenever the same source would be prepared to other rows.
      source: Where the rows come from.
      vocabulary: Rows of each embedding table.
      dense: Names of the columns of `dense`.
      labels: Names of the first columns of `labels`.
      auxiliary: Names of the others, which are trained on and not evaluated.
      longest: Values of the longest bag that a column may hold, by column.
      block_rows: Rows of every block but a split's last.
      features: Sparse features, where the data set's config does not say them.
      unseen: By held-out split and feature, ids that training has no row for.
      best_ne: Of planted data, by held-out split, the NE of the planted probabilities.
    """

    name: str
    version: str
    source: str
    vocabulary: Mapping[str, int]
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    auxiliary: tuple[str, ...] = ()
    longest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    block_rows: int = BLOCK_ROWS
    features: tuple[FeatureSpec, ...] = ()
    unseen: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    best_ne: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """An opened folder; `digest` is of all that its rows and timelines hold."""

    facts: Facts
    columns: Mapping[str, Column]
    splits: Mapping[str, FileBlocks]
    timelines: Timelines | None
    digest: str


def columns_of(block: Block) -> dict[str, Column]:
    """Describes the columns of a block."""
    return {
        name: Column(column.dtype.name, column.shape[1:], bag=f"{name}/lengths" in block)
        for name, column in block.items()
    }


class FileBlocks:
    """A split in array_record files, as `schema.Blocks`. Threads may read it at the same time; it can be pickled.

    Attributes:
      rows: Rows in all.
      block_rows: Rows of every block but the last.
      folder: The data set's.
    """

    def __init__(self, folder: Path, columns: Mapping[str, Column], split: Mapping[str, Any], block_rows: int):
        """Opens the files and reads the last block.

        Args:
          folder: The data set's.
          columns: Of every block.
          split: The manifest's entry: `rows` and `files`, each with `file`, `bytes` and `blocks`.
          block_rows: Rows of every block but the last.

        Raises:
          UserError: A file is absent or not as the manifest says.
        """
        self._arguments = (folder, columns, split, block_rows)
        self.folder, self._columns = folder, columns
        self.rows: int = split["rows"]
        self.block_rows = block_rows
        self._paths = [folder / file["file"] for file in split["files"]]
        self._ends = list(itertools.accumulate(file["blocks"] for file in split["files"]))
        if (self._ends[-1] if self._ends else 0) != len(self):
            raise _broken(folder / "manifest.json", f"counts {self.rows} rows but not as many blocks as they fill")
        # Sizes first: the reader takes a truncated file for an empty one.
        for path, file in zip(self._paths, split["files"], strict=True):
            if not path.is_file():
                raise _broken(path, "is missing", folder)
            if path.stat().st_size != file["bytes"]:
                raise _broken(path, f"has {path.stat().st_size} bytes where {file['bytes']} were written", folder)
        self._readers = [
            self._open(path, file["blocks"]) for path, file in zip(self._paths, split["files"], strict=True)
        ]
        if len(self):
            self[len(self) - 1]

    def __reduce__(self):
        return FileBlocks, self._arguments

    def __len__(self) -> int:
        return (self.rows + self.block_rows - 1) // self.block_rows

    def __getitem__(self, index: int) -> Block:
        """Returns block `index`: every column, as arrays of its own memory.

        Raises:
          UserError: The record is damaged, or does not hold the block's rows.
        """
        return self.decode(index, self.record(index))

    def record(self, index: int) -> bytes:
        """Reads block `index` as its file has it, unpacked.

        Raises:
          UserError: It cannot be read.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        file, record = self._place(index)
        try:
            return self._readers[file].read([record])[0]
        except Exception as error:  # array_record raises RuntimeError
            raise self._damaged(index) from error

    def decode(self, index: int, record: bytes) -> Block:
        """Decodes what `record(index)` has read.

        Raises:
          UserError: It is damaged, or does not hold the block's rows.
        """
        try:
            block = _decode(record, self._columns)
            has = rows_of(block, self._columns)
        except Exception as error:  # a damaged record may raise anything
            raise self._damaged(index) from error
        rows = min(self.block_rows, self.rows - index * self.block_rows)
        if has != rows:
            file, place = self._place(index)
            raise _broken(
                self._paths[file], f"has {has} rows in record {place} where there must be {rows}", self.folder
            )
        return block

    def _place(self, index: int) -> tuple[int, int]:
        """Returns a block's file and its record there."""
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)

    def _damaged(self, index: int) -> UserError:
        file, record = self._place(index)
        return _broken(self._paths[file], f"is damaged: record {record} cannot be read", self.folder)

    def _open(self, path: Path, blocks: int) -> Any:
        module = import_for_blocks("array_record.python.array_record_module", "array_record")
        try:
            # Blocks are read in any order, so nothing is read ahead.
            reader = module.ArrayRecordReader(
                str(path), options="readahead_buffer_size:0", file_reader_buffer_size=65536
            )
            records = reader.num_records()
        except Exception as error:
            raise _broken(path, "cannot be read as an array_record file", self.folder) from error
        if records != blocks:
            raise _broken(path, f"holds {records} blocks where {blocks} were written", self.folder)
        return reader


def read(folder: Path) -> Prepared:
    """Opens a prepared data set. Its timelines are loaded; its rows are read when they are asked for.

    Args:
      folder: `<data_dir>/<name>-<version>`.

    Raises:
      UserError: The folder is not a complete data set of that name and version, or a file of it was changed.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise _broken(path, "is missing") from None
    except (OSError, ValueError) as error:
        raise _broken(path, "cannot be read as JSON") from error
    format_version = manifest.get("format") if isinstance(manifest, dict) else None
    if format_version != FORMAT:
        raise _broken(path, f"is of format version {format_version} where this jaxrec reads {FORMAT}")
    try:
        facts = Facts(**manifest["facts"])
        lists = {name: tuple(getattr(facts, name)) for name in ("dense", "labels", "auxiliary")}
        features = tuple(FeatureSpec(**feature) for feature in manifest["facts"].get("features", ()))
        facts = dataclasses.replace(facts, **lists, features=features)
        columns = _columns_from(manifest["columns"])
        splits = {
            name: FileBlocks(folder, columns, split, facts.block_rows) for name, split in manifest["splits"].items()
        }
        timelines = _read_timelines(folder, manifest["timelines"], facts)
        of_rows = [[name, split["sha256"]] for name, split in sorted(manifest["splits"].items())]
        of_events = manifest["timelines"] and manifest["timelines"]["events"]["sha256"]
        digest = hashlib.sha256(json.dumps([of_rows, of_events, manifest["facts"]["vocabulary"]]).encode()).hexdigest()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(path, "is not a manifest that jaxrec wrote") from error
    if folder.name != f"{facts.name}-{facts.version}":
        raise _broken(path, f"is of data set {facts.name}-{facts.version}, not {folder.name}")
    return Prepared(facts, columns, splits, timelines, digest)


def _read_timelines(folder: Path, entry: Mapping[str, Any] | None, facts: Facts) -> Timelines | None:
    if entry is None:
        return None
    described = _columns_from(entry["columns"])
    blocks = FileBlocks(folder, described, entry["events"], facts.block_rows)
    parts = [blocks[i] for i in range(len(blocks))]
    columns = {
        name: np.concatenate([part[name] for part in parts] or [np.empty(0, column.dtype)])
        for name, column in described.items()
    }
    owner = columns.pop(OWNER)
    if len(owner) and (owner[0] < 0 or owner[-1] >= entry["owners"] or np.any(np.diff(owner) < 0)):
        raise _broken(folder / "timelines", "holds events that are not in the order of their owners", folder)
    offsets = np.searchsorted(owner, np.arange(entry["owners"] + 1)).astype(np.int64)
    return Timelines(offsets, columns, facts.name)


def rows_of(block: Block, columns: Mapping[str, Column]) -> int:
    """Rows of a block whose columns are those described.

    Raises:
      ValueError: They are not, or do not have the same number of rows.
    """
    if block.keys() != columns.keys():
        raise ValueError(f"a block must have the columns {sorted(columns)}, but has {sorted(block)}")
    for name, column in columns.items():
        array = block[name]
        if array.dtype != column.dtype or array.shape[1:] != column.shape:
            wanted = f"{column.dtype} {('n', *column.shape)}"
            raise ValueError(f"column {name} must be {wanted}, but is {array.dtype} {array.shape}")
        if column.bag and block[f"{name}/lengths"].sum(dtype=np.int64) != len(array):
            raise ValueError(f"the lengths of column {name} do not sum to its {len(array)} values")
    counts = {name: len(block[name]) for name, column in columns.items() if not column.bag}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the columns must have the same number of rows, but have {counts}")
    return next(iter(counts.values()))


def _decode(record: bytes, columns: Mapping[str, Column]) -> dict[str, np.ndarray]:
    """Decodes a `tf.train.Example` whose features are TFDS tensors in BYTES encoding.

    On the wire that is Example{1: Features{1: map entry{1: name, 2: Feature{1: BytesList{1: value}}}}}.

    Raises:
      Any exception: The record is not such an example.
    """
    block = {}
    for _, start, end in _fields(record, 0, len(record)):
        for _, entry_start, entry_end in _fields(record, start, end):
            entry = {number: (at, to) for number, at, to in _fields(record, entry_start, entry_end)}
            name = record[slice(*entry[1])].decode()
            column = columns[name]
            ((_, *value_list),) = _fields(record, *entry[2])
            ((_, at, to),) = _fields(record, *value_list)
            dtype = np.dtype(column.dtype)
            flat = np.frombuffer(record, dtype, (to - at) // dtype.itemsize, at) if to > at else np.empty(0, dtype)
            # Copied: a value lies at any address of the record, and need not be aligned.
            # A column without elements has as many rows as the others, which is not to be seen in its bytes.
            block[name] = flat.reshape(-1, *column.shape).copy() if math.prod(column.shape) else flat
    empty = [name for name in block if not math.prod(columns[name].shape)]
    if empty:
        rows = next(len(v) for name, v in block.items() if f"{name}/lengths" not in block and name not in empty)
        for name in empty:
            block[name] = block[name].reshape(rows, *columns[name].shape)
    return block


def _fields(buffer: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Walks the length-delimited fields of a protobuf message: (number, start, end) of each."""

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = buffer[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while position < end:
        key = varint()
        length = varint()
        if key & 7 != 2 or position + length > end:
            raise ValueError("not a message of length-delimited fields")
        yield key >> 3, position, position + length
        position += length


def _columns_from(described: Mapping[str, Any]) -> dict[str, Column]:
    return {name: Column(column["dtype"], tuple(column["shape"]), column["bag"]) for name, column in described.items()}


def _broken(path: Path, what: str, folder: Path | None = None) -> UserError:
    return UserError(f"{path} {what}: delete the folder {folder or path.parent} so that it is prepared again")


def import_for_blocks(module: str, package: str) -> Any:
    """Imports what reading and writing blocks needs; raises `UserError` where it is absent."""
    return import_package(module, f"reading or preparing data needs the package {package}", package)
