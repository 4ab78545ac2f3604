"""Reading delimited text, as it is found: streamed, plain or .gz, with every malformed row named by file and line.

Fields are read as text and converted by the caller, who knows what they mean; `numbers` does so for numbers.
"""

from __future__ import annotations

import codecs
import csv as csv_module
import dataclasses
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, require

# Bytes of text that are parsed at a time.
PIECE_BYTES = 8 << 20


@dataclasses.dataclass
class BadRows:
    """Counts malformed rows, and ends the reading where there are more than are allowed.

    Attributes:
      most: How many are allowed: `--max_bad_rows`.
      count: How many there were.
      first: The first few, in words.
    """

    most: int = 0
    count: int = 0
    first: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: Path, line: int, why: str) -> None:
        """Counts a row.

        Raises:
          UserError: It is one too many.
        """
        self.count += 1
        if len(self.first) < 5:
            self.first.append(f"{path}, line {line}: {why}")
        allowed = f"--max_bad_rows allows {self.most}"
        require(self.count <= self.most, f"{path}, line {line}: {why}; {allowed} malformed rows")


class Rows(NamedTuple):
    """A piece of a table.

    Attributes:
      lines: int64 [n], each row's line in the file, from 1.
      columns: Name -> pyarrow string array [n]; an empty field is an empty string.
    """

    lines: np.ndarray
    columns: dict[str, Any]

    def without(self, bad: np.ndarray) -> Rows:
        """Returns the rows where `bad`, bool [n], is not set."""
        if not bad.any():
            return self
        keep = _import("pyarrow").array(~bad)
        return Rows(self.lines[~bad], {name: column.filter(keep) for name, column in self.columns.items()})


def read(
    path: Path,
    bad_rows: BadRows,
    *,
    delimiter: str,
    names: Sequence[str] | None = None,
    encoding: str = "utf-8",
    quoted: bool = True,
    data: IO[bytes] | None = None,
) -> Iterator[Rows]:
    """Reads a file piece by piece.

    Args:
      path: For messages, and what is read: .gz is unpacked.
      bad_rows: Where rows with another number of fields are counted, and left out.
      delimiter: Between the fields: one byte, or `::`.
      names: Of the columns; None: the first line has them.
      encoding: Of the text.
      quoted: Whether a field may be in double quotes.
      data: Read instead of the file `path`.

    Raises:
      UserError: The file is absent, empty, cannot be read as text, or has too many malformed rows.
    """
    csv, arrow = _import("pyarrow.csv"), _import("pyarrow")
    wrong: list[tuple[int, str]] = []

    def invalid(row: Any) -> str:
        wrong.append((int(row.number), f"it has {row.actual_columns} fields, but must have {row.expected_columns}"))
        return "skip"

    try:
        with open_binary(path) if data is None else data as file:
            text = _Text(_Separated(file, delimiter) if len(delimiter) > 1 else file, path, encoding)
            header = list(names) if names is not None else _header(path, text.first_line(), delimiter, encoding)
            if text.is_empty():
                return
            reader = csv.open_csv(
                text,
                read_options=csv.ReadOptions(
                    use_threads=False, block_size=PIECE_BYTES, column_names=header, encoding=encoding
                ),
                parse_options=csv.ParseOptions(
                    delimiter=_Separated.BYTE if len(delimiter) > 1 else delimiter,
                    quote_char='"' if quoted else False,
                    invalid_row_handler=invalid,
                    ignore_empty_lines=False,
                ),
                convert_options=csv.ConvertOptions(
                    column_types=dict.fromkeys(header, arrow.string()), strings_can_be_null=False
                ),
            )
            yield from _pieces(path, reader, wrong, bad_rows, 1 if names is not None else 2)
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror or e}") from e
    except (ValueError, EOFError, zlib.error) as e:  # pyarrow's ArrowInvalid among them
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise UserError(f"{path} cannot be read as text separated by {delimiter!r} ({encoding}): {said}") from e


def _pieces(
    path: Path, reader: Any, wrong: list[tuple[int, str]], bad_rows: BadRows, first_line: int
) -> Iterator[Rows]:
    """Yields the reader's pieces with their lines; rows that the parser has refused are counted."""
    row = 1  # pyarrow's number of the next.
    counted = 0

    def count(before: float) -> None:
        nonlocal counted
        while counted < len(wrong) and wrong[counted][0] < before:
            bad_rows.add(path, wrong[counted][0] - 1 + first_line, wrong[counted][1])
            counted += 1

    for piece in reader:
        n, refused = piece.num_rows, np.array([number for number, _ in wrong if number >= row], np.int64)
        numbers = np.arange(row, row + n + len(refused))
        numbers = numbers[~np.isin(numbers, refused)][:n]
        if n:
            row = int(numbers[-1]) + 1
            count(row)
            yield Rows(numbers - 1 + first_line, dict(zip(piece.schema.names, piece.columns, strict=True)))
    count(math.inf)


def numbers(
    rows: Rows, name: str, dtype: str, path: Path, bad_rows: BadRows, *, empty: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Converts a column to numbers.

    Args:
      rows: The piece.
      name: The column.
      dtype: `int64` or `float64`.
      path: For messages.
      bad_rows: Where rows are counted that hold something else.
      empty: What an empty field means; None: it is malformed.

    Returns:
      Numbers [n], and bool [n]: which rows are malformed (their numbers are 0).
    """
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    column = compute.utf8_trim_whitespace(rows.columns[name])
    kind = {"int64": arrow.int64(), "float64": arrow.float64()}[dtype]
    blank = np.asarray(compute.equal(column, ""))
    filled = compute.if_else(compute.equal(column, ""), "0", column) if blank.any() else column
    try:
        values, bad = np.asarray(filled.cast(kind)), np.zeros(len(rows.lines), bool)
    except ValueError:  # Some are malformed: one by one.
        values, bad = np.zeros(len(rows.lines), dtype), np.zeros(len(rows.lines), bool)
        for i, text in enumerate(filled.to_pylist()):
            try:
                values[i] = int(text) if dtype == "int64" else float(text)
            except (ValueError, OverflowError):
                bad[i] = True
    if dtype == "float64":
        bad |= ~np.isfinite(values)
    if empty is None:
        bad |= blank
    elif blank.any():
        values = np.where(blank, empty, values)
    for i in np.flatnonzero(bad):
        text = column[int(i)].as_py()
        what = "a whole number" if dtype == "int64" else "a number"
        bad_rows.add(path, int(rows.lines[i]), f"{name} is {text[:40]!r}, but must be {what}")
    return np.where(bad, 0, values), bad


def open_binary(path: Path) -> Any:
    """Opens a file for reading, unpacked where its name ends with .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _header(path: Path, line: bytes, delimiter: str, encoding: str) -> list[str]:
    text = line.decode(encoding).removeprefix("\ufeff").rstrip("\r\n")
    require(bool(text), f"{path} is empty, but must have the columns' names in its first line")
    single = _Separated.BYTE if len(delimiter) > 1 else delimiter
    return [name.strip() for name in next(csv_module.reader([text], delimiter=single))]


class _Text(io.RawIOBase):
    """A file for pyarrow: its first line may be taken off, and what is not UTF-8 is refused with its line.

    pyarrow would leave out a malformed row that is not UTF-8 and tell nobody.
    """

    def __init__(self, file: Any, path: Path, encoding: str):
        self._file, self._path = file, path
        self._ready, self._line = b"", 1
        self._decoder = codecs.getincrementaldecoder("utf-8")() if encoding == "utf-8" else None

    def readable(self) -> bool:
        return True

    def first_line(self) -> bytes:
        """Takes the first line, with its end."""
        while b"\n" not in self._ready:
            require(len(self._ready) < 1 << 20, f"{self._path}: its first line is longer than a megabyte")
            piece = self._more(1 << 16)
            if not piece:
                break
            self._ready += piece
        line, end, self._ready = self._ready.partition(b"\n")
        return line + end

    def is_empty(self) -> bool:
        """Whether nothing is left."""
        self._ready = self._ready or self._more(1 << 16)
        return not self._ready

    def read(self, size: int = -1) -> bytes:
        taken, self._ready = (self._ready, b"") if size < 0 else (self._ready[:size], self._ready[size:])
        return taken + self._more(size) if size < 0 or not taken else taken

    def _more(self, size: int) -> bytes:
        piece = self._file.read(size)
        if self._decoder is not None:
            try:
                self._decoder.decode(piece, final=not piece)
            except UnicodeDecodeError as e:
                line = self._line + piece[: max(e.start, 0)].count(b"\n")
                raise UserError(f"{self._path}, line {line}: it is not UTF-8 text") from e
        self._line += piece.count(b"\n")
        return piece


class _Separated:
    """A file whose separator of two bytes is replaced by one that no text holds."""

    BYTE = "\x1f"

    def __init__(self, file: IO[bytes], delimiter: str):
        self._file, self._delimiter = file, delimiter.encode()
        self._ready, self._rest = b"", b""

    def read(self, size: int = -1) -> bytes:
        while len(self._ready) < size or size < 0:
            piece = self._file.read(PIECE_BYTES)
            text = self._rest + piece
            # The first half of a separator may end a piece: an odd number of its bytes does.
            half = self._delimiter[:1]
            odd = (len(text) - len(text.rstrip(half))) % 2
            self._rest = half if piece and odd else b""
            text = text[: len(text) - len(self._rest)]
            self._ready += text.replace(self._delimiter, self.BYTE.encode())
            if not piece:
                break
        size = len(self._ready) if size < 0 else size
        taken, self._ready = self._ready[:size], self._ready[size:]
        return taken


def _import(module: str) -> Any:
    return import_package(module, "reading tables of text needs the package pyarrow", "'jaxrec[prepare]'")
