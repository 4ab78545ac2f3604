"""Tables that `jaxrec.prepare` has prepared: the user's own, Criteo's, or synthetic rows on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrec.checks import require
from jaxrec.data.blocks import read
from jaxrec.data.schema import Dataset, Schema

if TYPE_CHECKING:
    from jaxrec.data.tabular.files import TableFile
    from jaxrec.data.tabular.schema import TableSchema
    from jaxrec.data.tabular.text_tables import BadRows

# Raised whenever the same table and schema would be prepared to other rows.
VERSION = "1.0.0"
# Raised whenever parts that an earlier version has kept would not be those of this one.
PARTS_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TabularData:
    """A prepared table.

    Attributes:
      table: Its name, as `jaxrec.prepare` printed it (without the version).
    """

    table: str = ""

    def open(self, data_dir: str) -> Dataset:
        """Opens the data set in `data_dir`.

        Raises:
          UserError: It is not there, or what is there is damaged.
        """
        require(
            bool(self.table),
            "data.table is not given; --set data.table=NAME names a table that python -m jaxrec.prepare has prepared",
        )
        folder = folder_of(data_dir, self.table)
        require(
            folder.exists(),
            f"data.table is {self.table!r}, but --data_dir={data_dir} holds no {folder.name}; prepare it: "
            f"python -m jaxrec.prepare --dataset=tabular --input=PATH --schema=FILE --data_dir={data_dir}",
        )
        prepared = read(folder)
        facts = prepared.facts
        require(
            bool(facts.features),
            f"data.table is {self.table!r}, but {folder} says nothing of its features; use the config made for it",
        )
        schema = Schema(facts.features, facts.vocabulary, facts.dense, facts.labels, facts.auxiliary)
        return Dataset(
            facts.name, schema, prepared.splits, prepared.timelines, facts.best_ne.get, facts.unseen, prepared.digest
        )


def folder_of(data_dir: str, name: str) -> Path:
    """Returns where a table of that name is prepared."""
    return Path(data_dir) / f"{name}-{VERSION}"


def write(
    files: Sequence[TableFile],
    schema: TableSchema,
    data_dir: str,
    source: str,
    bad_rows: BadRows,
    *,
    threads: int,
    compression: str = "zstd",
) -> tuple[Path, int, int]:
    """Prepares a table in `folder_of(data_dir, schema.name)`.

    What it has read is kept beside until it is done, so that the same call goes on where it was interrupted.

    Args:
      files: Of the table.
      schema: What its columns are for; it has a name.
      data_dir: Where prepared data sets are.
      source: Where the rows come from, for the data set's facts.
      bad_rows: Where malformed rows are counted.
      threads: That read and encode.
      compression: As `block_writer.prepare` takes it.

    Returns:
      The folder, the rows of the files (malformed ones included), and those that were written.

    Raises:
      UserError: The folder exists, a file cannot be read, there are too many malformed rows, a split is empty, or the
        disk has no room.
    """
    # Imported late: training needs none of it.
    from jaxrec.data import block_writer
    from jaxrec.data.tabular import encode, parts

    folder = folder_of(data_dir, schema.name)
    use = f"train on it with --config=dlrm_tabular --set data.table={schema.name}"
    identity = {"format": PARTS_FORMAT, "files": _states(files), "schema": dataclasses.asdict(schema)}
    scratch = folder.parent / f".{folder.name}.parts"
    with block_writer.locked(folder.parent, f".{folder.name}.parts.lock", folder.name):
        # One whose parts were not yet deleted was interrupted at its very end, and is completed.
        done = folder.exists() and not parts.are_of(scratch, identity)
        require(not done, f"{folder} exists already; {use}, delete it, or give another --name")
        with parts.kept_in(scratch, identity):
            made, rows_in = parts.make(files, schema, scratch, bad_rows, threads=threads)
            require(bool(made), f"{files[0].path} has no rows")
            require(
                _states(files) == identity["files"],
                f"{files[0].path}, or another file of the table, has changed while it was read; give the command again",
            )
            encoded = encode.encode(made, files, schema, VERSION, source, scratch, threads=threads)
            block_writer.prepare(folder, encoded.facts, encoded.columns, encoded.splits, encoded.timelines, compression)
    return folder, rows_in, sum(rows for rows, _ in encoded.splits.values())


def _states(files: Sequence[TableFile]) -> list[list[Any]]:
    """Returns what changes when a file does."""
    stats = [(f, f.path.stat()) for f in files]
    return [[str(f.path.resolve()), s.st_ino, s.st_size, s.st_mtime_ns, f.split] for f, s in stats]
