"""Writing a prepared data set: blocks of rows, through TensorFlow Datasets but not TensorFlow; all of it or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from jaxrec.checks import UserError, require
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.blocks import FORMAT, OWNER, Column, Facts, FileBlocks, columns_of, import_for_blocks, rows_of
from jaxrec.data.schema import Block, Blocks
from jaxrec.data.timelines import Timelines

# TFDS holds a file's blocks in memory while it writes the file.
BLOCKS_PER_FILE = 64
# Options of array_record. A group is a record, so that a block is read alone. zstd at level 1 is read as fast as at its
# default level and written in two thirds of the time, and is 7 % larger on rows like Criteo's.
COMPRESSIONS = {"zstd": "group_size:1,zstd:1", "none": "group_size:1,uncompressed"}


def counted(blocks: Blocks) -> tuple[int, Iterator[Block]]:
    """What `prepare` takes of a split: its rows and its blocks in order."""
    return blocks.rows, map(blocks.__getitem__, range(len(blocks)))


def prepare(
    folder: Path,
    facts: Facts,
    columns: Mapping[str, Column],
    splits: Mapping[str, tuple[int, Iterable[Block]]],
    timelines: Timelines | None = None,
    compression: str = "zstd",
) -> None:
    """Writes a data set, all of it or nothing; does nothing where the folder exists and is of the same facts.

    It is written to a temporary folder beside, read back, compared with what was given, and renamed. Of several
    processes that prepare the same folder, one writes and the others wait for it.

    Args:
      folder: `<data_dir>/<name>-<version>`.
      facts: What the manifest says.
      columns: Of every block.
      splits: By name: how many rows there must be, and their blocks, of `facts.block_rows` rows each but the last.
      timelines: The events, where rows have histories.
      compression: One of `COMPRESSIONS`. Without, files are about three times as large, and read faster.

    Raises:
      UserError: The folder holds another data set, the rows given are not as many as announced, the rows read back are
        not those given, the folder cannot be written, or a package is missing.
      ValueError: A block is not as `columns` and `facts.block_rows` say.
    """
    if folder.name != f"{facts.name}-{facts.version}":
        raise ValueError(f"folder must be named {facts.name}-{facts.version}, got {folder}")
    with locked(folder.parent, f".{folder.name}.lock", folder.name) as alone:
        if folder.exists():
            require(
                _facts_in(folder) == json.loads(json.dumps(dataclasses.asdict(facts))),
                f"{folder} exists already, and holds other rows than these; delete it, or choose another name",
            )
            return
        if alone:  # whoever made these was killed
            for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
        temporary = folder.parent / f".{folder.name}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            with writing_to(folder.parent):
                temporary.mkdir()
                _write(temporary, facts, columns, splits, timelines, COMPRESSIONS[compression])
                try:
                    temporary.rename(folder)
                except OSError:
                    # Without locks another process may have been faster. Its folder is as good as ours.
                    if not folder.exists():
                        raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _facts_in(folder: Path) -> Any:
    try:
        return json.loads((folder / "manifest.json").read_text())["facts"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def writing_to(data_dir: Path) -> Iterator[None]:
    """Turns a disk without room, or a folder that cannot be written, into a sentence."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # array_record raises RuntimeError, and says in words what the system said.
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            raise UserError(
                f"--data_dir is {str(data_dir)!r}, whose disk has no room left (or takes no file as large); make room "
                "and give the same command again"
            ) from error
        if isinstance(error, RuntimeError):
            raise
        raise UserError(
            f"--data_dir is {str(data_dir)!r}, but must be a folder that can be written: {error.strerror}"
        ) from error


@contextlib.contextmanager
def locked(data_dir: Path, name: str, what: str) -> Iterator[bool]:
    """Waits until no other process holds the lock `name` in `data_dir`, and holds it.

    Yields:
      Whether it does: some file systems have no locks.

    Raises:
      UserError: The folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with writing_to(data_dir):
            data_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(data_dir / name, "w"))
        yield _wait_for(lock, what)


def _wait_for(lock: IO[str], name: str) -> bool:
    """Waits until no other process prepares the data set; False where the file system has no locks."""
    try:
        import fcntl  # not on Windows

        # The system drops the lock when its process dies, however it dies.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: waiting for another process that prepares it", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
    except (ImportError, OSError):
        return False
    return True


def _write(
    folder: Path,
    facts: Facts,
    columns: Mapping[str, Column],
    splits: Mapping[str, tuple[int, Iterable[Block]]],
    timelines: Timelines | None,
    options: str,
) -> None:
    """Writes and checks the temporary folder, the manifest last."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "facts": dataclasses.asdict(facts),
        "columns": {name: dataclasses.asdict(column) for name, column in columns.items()},
        "splits": _write_rows(folder, "rows", facts, columns, splits, options),
        "timelines": None,
    }
    if timelines is not None:
        owner = np.repeat(np.arange(timelines.owners, dtype=np.int32), np.diff(timelines.offsets))
        events = ArrayBlocks({OWNER: owner, **timelines.columns}, facts.block_rows)
        described = columns_of({OWNER: owner, **timelines.columns})
        given = {"events": counted(events)}
        manifest["timelines"] = {
            "owners": timelines.owners,
            "columns": {name: dataclasses.asdict(column) for name, column in described.items()},
            **_write_rows(folder, "timelines", facts, described, given, options),
        }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _write_rows(
    folder: Path,
    dataset: str,
    facts: Facts,
    columns: Mapping[str, Column],
    splits: Mapping[str, tuple[int, Iterable[Block]]],
    options: str,
) -> dict[str, Any]:
    """Writes splits as one TFDS data set and reads them back; returns the manifest's entries."""
    entries: dict[str, Any] = {}
    blocks_in = {split: -(-rows // facts.block_rows) for split, (rows, _) in splits.items()}
    with _progress(f"{facts.name}: writing {dataset}", sum(blocks_in.values())) as advance:
        given = {
            split: _Given(f"data set {facts.name}: split {split}", splits[split], columns, facts.block_rows, advance)
            for split in splits
        }
        # TFDS refuses a split without a record.
        shards = {split: given[split].files() for split, blocks in blocks_in.items() if blocks}
        written = _write_tfds(folder, dataset, facts, columns, shards, options)
    for split in splits:
        given[split].finish()
        entries[split] = {
            "rows": given[split].rows,
            "sha256": given[split].digest.hexdigest(),
            "files": [
                {
                    "file": path.relative_to(folder).as_posix(),
                    "bytes": path.stat().st_size,
                    "blocks": min(BLOCKS_PER_FILE, blocks_in[split] - i * BLOCKS_PER_FILE),
                }
                for i, path in enumerate(sorted(written.glob(f"{dataset}-{split}.array_record-*")))
            ],
        }
    with _progress(f"{facts.name}: checking {dataset}", sum(blocks_in.values())) as advance:
        for split, entry in entries.items():
            digest = hashlib.sha256()
            with contextlib.suppress(UserError):  # what cannot be read has another digest
                blocks = FileBlocks(folder, columns, entry, facts.block_rows)
                for i in range(len(blocks)):
                    _update(digest, blocks[i])
                    advance()
            require(
                digest.hexdigest() == entry["sha256"],
                f"data set {facts.name}: the rows of split {split} that were read back from {folder.parent} are not "
                "those that were written: its disk must have room and be sound",
            )
    return entries


class _Given:
    """The blocks of a split on their way to TFDS: checked, counted, digested."""

    def __init__(
        self,
        where: str,
        given: tuple[int, Iterable[Block]],
        columns: Mapping[str, Column],
        block_rows: int,
        advance: Callable[[], object],
    ):
        self.rows, blocks = given
        self.digest = hashlib.sha256()
        self._where, self._columns, self._block_rows, self._advance = where, columns, block_rows, advance
        self._blocks = enumerate(blocks)
        self._seen = 0

    def files(self) -> list[Callable[[], Iterator[tuple[int, Block]]]]:
        """For each file, in their order, what makes its (key, block)."""
        files = -(-self.rows // (self._block_rows * BLOCKS_PER_FILE))
        return [lambda: self._next(BLOCKS_PER_FILE)] * files

    def _next(self, count: int) -> Iterator[tuple[int, Block]]:
        for i, block in itertools.islice(self._blocks, count):
            if self._seen != i * self._block_rows:
                raise ValueError(f"{self._where}: every block but the last must have {self._block_rows} rows")
            rows = rows_of(block, self._columns)
            if not 0 < rows <= self._block_rows:
                raise ValueError(f"{self._where}: a block must have 1 to {self._block_rows} rows, but one has {rows}")
            self._seen += rows
            _update(self.digest, block)
            yield i, block
            self._advance()

    def finish(self) -> None:
        """Raises `UserError` unless the rows were as many as announced."""
        for _, block in self._blocks:
            self._seen += rows_of(block, self._columns)
        require(
            self._seen == self.rows,
            f"{self._where} has {self._seen} rows, but must have {self.rows}: its source is incomplete or has changed",
        )


def _update(digest: Any, block: Block) -> None:
    for name in sorted(block):
        digest.update(np.ascontiguousarray(block[name]).data)


def _write_tfds(
    folder: Path,
    dataset: str,
    facts: Facts,
    columns: Mapping[str, Column],
    shards: Mapping[str, list[Callable[[], Iterator[tuple[int, Block]]]]],
    options: str,
) -> Path:
    """Writes a TFDS data set, one record a block; returns its folder."""
    tfds = import_for_blocks("tensorflow_datasets", "tensorflow-datasets")
    array_record = import_for_blocks("array_record.python.array_record_module", "array_record")
    base = import_for_blocks("tensorflow_datasets.core.writer", "tensorflow-datasets").ExampleWriter

    class ArrayRecords(base):
        """TFDS's own writer has no options."""

        def write(self, path, examples):
            writer = array_record.ArrayRecordWriter(os.fspath(path), options)
            for _, record in examples:
                writer.write(record)
            writer.close()

    features = {
        column_name: tfds.features.Tensor(
            shape=(None, *column.shape), dtype=np.dtype(column.dtype), encoding=tfds.features.Encoding.BYTES
        )
        for column_name, column in columns.items()
    }

    # Not GeneratorBasedBuilder: it gathers and sorts all records, and beyond 1 GB of them needs TensorFlow.
    class TfdsBlocks(tfds.core.ShardBasedBuilder, skip_registration=True):  # pyright: ignore
        VERSION = tfds.core.Version(facts.version)
        name = dataset
        url_infos = None  # nothing is downloaded; TFDS's own look-up needs a package that it does not install

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self,
                description=f"{facts.name}: {dataset}, in blocks. Source: {facts.source}.",
                features=tfds.features.FeaturesDict(features),
                disable_shuffling=True,
            )

        def _shard_iterators_per_split(self, dl_manager):
            del dl_manager
            return shards

        def _example_writer(self):
            return ArrayRecords(self.info.file_format)

        def _log_download_bytes(self):
            """Prints nothing: TFDS would print sizes that it does not know, to stdout."""

        def _log_download_done(self):
            """Prints nothing: the folder that TFDS would name is renamed."""

    builder = TfdsBlocks(data_dir=str(folder), file_format="array_record")
    builder.download_and_prepare(download_dir=str(folder / "downloads"))
    shutil.rmtree(folder / "downloads", ignore_errors=True)
    return Path(builder.data_dir)


@contextlib.contextmanager
def _progress(what: str, blocks: int) -> Iterator[Callable[[], object]]:
    with import_for_blocks("tqdm", "tqdm").tqdm(total=blocks, desc=what, unit="block", file=sys.stderr) as bar:
        yield bar.update
