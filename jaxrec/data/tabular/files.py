"""The files of a table: which there are, how they are written, and their rows in pieces for any thread to parse."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, require
from jaxrec.data.tabular import text_rows, text_tables
from jaxrec.data.tabular.schema import SPLITS, TableSchema
from jaxrec.data.tabular.text_rows import Format
from jaxrec.data.tabular.text_tables import Rows

# Rows of a parquet file that are converted at a time.
PARQUET_ROWS = 1 << 16
DELIMITERS = ("\t", ",", ";", "|")
SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".pq")


class Parsed(NamedTuple):
    """Rows, and (line, why) of those that are malformed."""

    rows: Rows
    wrong: list[tuple[int, str]]


class Task(NamedTuple):
    """A piece of a file.

    Attributes:
      start: Where in the file it begins (bytes of text, or rows of parquet).
      size: How much of it there is, in the same unit.
      parse: Parses it; takes columns and the types wanted of them.
    """

    start: int
    size: int
    parse: Callable[[Mapping[str, Any] | None], Parsed]


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file.

    Attributes:
      path: Where it is.
      form: How it is written; None: parquet.
      split: Which split it is, with `split.by = "files"`.
    """

    path: Path
    form: Format | None
    split: str = ""

    @property
    def bytes(self) -> int:
        """Its size."""
        return self.path.stat().st_size

    @contextlib.contextmanager
    def opened(self) -> Iterator[tuple[tuple[str, ...], Iterator[Task]]]:
        """Opens it: the columns' names, and its tasks one after the other.

        Raises:
          UserError: It cannot be read, or is not what its name says.
        """
        if self.form is None:
            with _opened_parquet(self.path) as opened:
                yield opened
            return
        form = self.form
        with text_rows.opened(self.path, form) as (names, pieces):

            def task(piece: text_rows.Piece) -> Task:
                return Task(
                    piece.start,
                    len(piece.text),
                    lambda types: Parsed(*text_tables.parse(piece, self.path, names, form, types)),
                )

            yield names, map(task, pieces)


def find(path: Path | Sequence[Path], schema: TableSchema | None = None) -> list[TableFile]:
    """Finds the files of a table.

    Args:
      path: A file, or a folder of files, which are taken in the order of their names (day_2 before day_10); or files.
      schema: Says how they are written, and which to take of a folder; None: nothing is known of them.

    Raises:
      UserError: There is none, or the files that the schema names are absent.
    """
    if not isinstance(path, Path):
        return [TableFile(file, _form(file, schema)) for file in path]
    with text_rows.readable(path):
        return _find(path, schema)


def _find(path: Path, schema: TableSchema | None) -> list[TableFile]:
    require(path.exists(), f"--input is {str(path)!r}, which does not exist")
    if schema is not None and schema.split.by == "files":
        named = {split: path / schema.files[split] for split in SPLITS}
        for split, file in named.items():
            require(file.is_file(), f"--input is {str(path)!r}, but files.{split} of the schema, {file}, is not a file")
        different = {file.resolve() for file in named.values()}
        require(len(different) == len(named), "files.train, files.validation and files.test must be different files")
        return [TableFile(file, _form(file, schema), split) for split, file in named.items()]
    if path.is_file():
        return [TableFile(path, _form(path, schema))]
    require(path.is_dir(), f"--input is {str(path)!r}, but must be a file or a folder")
    files = sorted((f for f in path.iterdir() if _is_table(f)), key=lambda f: _natural(f.name))
    for file in files:
        require(file.is_file(), f"--input is {str(path)!r}, but {file.name} in it is not a file")
    require(bool(files), f"--input is {str(path)!r}, a folder without files that end with {', '.join(SUFFIXES)} or .gz")
    return [TableFile(f, _form(f, schema)) for f in files]


def _is_table(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    return not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES


def _natural(name: str) -> list[int | str]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def is_parquet(path: Path) -> bool:
    """Whether a file is taken for parquet, by its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def _form(path: Path, schema: TableSchema | None) -> Format | None:
    if is_parquet(path):
        return None
    if schema is None:
        return Format(delimiter_of(path))
    delimiter = schema.delimiter or delimiter_of(path)
    quoted = schema.quoted and delimiter != "::"
    return Format(delimiter, schema.names, schema.encoding, quoted, schema.optional_fields)


def delimiter_of(path: Path) -> str:
    """Returns the most frequent of DELIMITERS in a file's first line (the first of equals)."""
    with text_rows.readable(path), text_rows.open_binary(path) as file:
        line = file.readline(1 << 20)
    return max(DELIMITERS, key=lambda d: line.count(d.encode()))


@contextlib.contextmanager
def _opened_parquet(path: Path) -> Iterator[tuple[tuple[str, ...], Iterator[Task]]]:
    parquet = import_package("pyarrow.parquet", "reading parquet needs the package pyarrow", "'jaxrec[prepare]'")
    arrow = import_package("pyarrow", "reading parquet needs the package pyarrow", "'jaxrec[prepare]'")

    @contextlib.contextmanager
    def readable() -> Iterator[None]:
        try:
            yield
        except (OSError, arrow.ArrowException) as e:
            said = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise UserError(f"{path} cannot be read as parquet: {said}") from e

    with contextlib.ExitStack() as stack:
        with readable():
            file = stack.enter_context(parquet.ParquetFile(path))
            names = tuple(file.schema_arrow.names)

        def tasks() -> Iterator[Task]:
            start = 0
            batches = file.iter_batches(batch_size=PARQUET_ROWS)
            while True:
                with readable():
                    batch = next(batches, None)
                if batch is None:
                    return
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                rows = Rows(start + 1 + np.arange(batch.num_rows), columns)
                yield Task(start, batch.num_rows, lambda types, rows=rows: Parsed(_selected(rows, types, path), []))
                start += batch.num_rows

        yield names, tasks()


def _selected(rows: Rows, types: Mapping[str, Any] | None, path: Path) -> Rows:
    names = rows.columns if types is None else types
    return Rows(rows.lines, {name: _plain(rows.columns[name], f"{path}: column {name!r}") for name in names})


def _plain(column: Any, where: str) -> Any:
    """Returns a column of numbers, dates, text, or lists of text, whatever parquet's types for them are."""
    arrow = import_package("pyarrow", "reading parquet needs the package pyarrow", "'jaxrec[prepare]'")
    types = arrow.types
    kind = column.type
    if types.is_float16(kind):
        return column.cast(arrow.float32())
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return column
    if types.is_string(kind):
        try:
            column.validate(full=True)
        except arrow.ArrowException as e:
            raise UserError(f"{where} holds text that is not UTF-8") from e
        return column
    if types.is_date(kind) or types.is_timestamp(kind):
        return column
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    try:
        return column.cast(arrow.list_(arrow.string()) if lists else arrow.string())
    except arrow.ArrowException as e:
        raise UserError(f"{where} is of type {kind}, but must hold numbers, dates, text, or lists of these") from e
