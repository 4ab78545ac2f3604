"""Reading delimited text as it is found: streamed, plain or .gz, every malformed row named by file and line.

A file is cut into pieces that end where rows end, one after the other (`opened`); pieces are parsed in any order and
by any thread (`parse`). What a row is does not depend on where pieces end. A row is malformed where it has another
number of fields than the others, is not text of the file's encoding, or holds a quote or a carriage return where the
format has none; the row after it begins on the next line.

Fields are text, or what the caller names for their columns; `numbers` converts them and names what is no number.
"""

from __future__ import annotations

import codecs
import contextlib
import csv as csv_module
import dataclasses
import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, require

# Bytes of text that are parsed at a time.
PIECE_BYTES = 8 << 20
# A quoted field may hold line ends. One of more bytes than this was never closed.
LONGEST_QUOTED = 1 << 20
# Neither a table's first line nor any other is as long as this.
LONGEST_FIRST_LINE = 1 << 20
LONGEST_LINE = 64 << 20
# Stands for a separator of two bytes.
_UNIT_SEPARATOR = "\x1f"
_INTEGER = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


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


@dataclasses.dataclass(frozen=True)
class Format:
    """How a table is written.

    Attributes:
      delimiter: Between the fields: one byte, or `::`.
      names: Of the columns; None: the first line has them. Where a first line repeats them, it is passed over.
      encoding: Of the text.
      quoted: Whether a field may be in double quotes; not with a delimiter of two bytes.
    """

    delimiter: str = ","
    names: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    quoted: bool = True

    def __post_init__(self):
        single = len(self.delimiter.encode()) == 1 and self.delimiter not in '\r\n"\0'
        require(
            single or self.delimiter == "::",
            f"the delimiter is {self.delimiter!r}, but must be an ASCII character (no quote, no line end) or ::",
        )
        require(single or not self.quoted, "with the delimiter :: no field can be quoted")
        try:
            "".encode(self.encoding)  # Python has codecs that are not of text, and one that refuses all.
        except (LookupError, ValueError):
            raise UserError(f"the encoding is {self.encoding!r}, but must be one that Python knows") from None

    @property
    def byte(self) -> str:
        """What separates the fields when they are parsed."""
        return _UNIT_SEPARATOR if len(self.delimiter) > 1 else self.delimiter


class Piece(NamedTuple):
    """A part of a file.

    Attributes:
      start: Its first byte in the file, unpacked and in UTF-8.
      line: Its first line, from 1.
      text: Whole rows, in UTF-8.
    """

    start: int
    line: int
    text: bytes


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
      lines: int64 [n], each row's line in the file, from 1.
      columns: Name -> pyarrow array [n]; of text, an empty field is an empty string; of numbers, it is null.
    """

    lines: np.ndarray
    columns: dict[str, Any]

    def without(self, bad: np.ndarray) -> Rows:
        """Returns the rows where `bad`, bool [n], is not set."""
        if not bad.any():
            return self
        keep = _import("pyarrow").array(~bad)
        return Rows(self.lines[~bad], {name: column.filter(keep) for name, column in self.columns.items()})


def read(path: Path, bad_rows: BadRows, form: Format, data: IO[bytes] | None = None) -> Iterator[Rows]:
    """Reads a file piece by piece, every field as text.

    Args:
      path: For messages, and what is read: .gz is unpacked.
      bad_rows: Where malformed rows are counted, and left out.
      form: How the table is written.
      data: Read instead of the file `path`.

    Raises:
      UserError: The file is absent, empty, cannot be read as text, or has too many malformed rows.
    """
    with opened(path, form, data) as (names, pieces):
        for piece in pieces:
            rows, wrong = parse(piece, path, names, form)
            for line, why in wrong:
                bad_rows.add(path, line, why)
            if len(rows.lines):
                yield rows


@contextlib.contextmanager
def opened(
    path: Path, form: Format, data: IO[bytes] | None = None
) -> Iterator[tuple[tuple[str, ...], Iterator[Piece]]]:
    """Opens a file: the columns' names, and its rows cut into pieces.

    Raises:
      UserError: The file is absent, empty, cannot be read or has no header where it must; also while iterating.
    """
    with readable(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(open_binary(path)) if data is None else data
        if codecs.lookup(form.encoding).name != "utf-8":
            file = _Transcoded(file, path, form.encoding)
        begin = _read_up_to(file, PIECE_BYTES)
        while b"\n" not in begin and len(begin) < LONGEST_FIRST_LINE and (more := file.read(PIECE_BYTES)):
            begin += more
        skipped = len(codecs.BOM_UTF8) if begin.startswith(codecs.BOM_UTF8) else 0
        head, end, _ = begin[skipped:].partition(b"\n")
        require(
            bool(end) or len(head) < LONGEST_FIRST_LINE,
            f"{path}: its first line is longer than a megabyte, so it is no table",
        )
        first = _fields_of(head.rstrip(b"\r"), form)
        names = form.names
        if names is None:
            require(bool(head + end), f"{path} is empty, but must have the columns' names in its first line")
            require(any(first), f"{path}: its first line is {head[:40]!r}, but must be the columns' names")
            names = tuple(first)
            twice = [name for name in names if names.count(name) > 1]
            require(not twice, f"{path}: its first line names column {(twice or [''])[0]!r} twice")
        has_header = first == list(names)
        skipped += len(head) + len(end) if has_header else 0
        yield names, _cut(path, form, file, begin[skipped:], skipped, 2 if has_header else 1)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what may go wrong when a file is read into a sentence."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as e:
        said = (e.strerror if isinstance(e, OSError) else "") or str(e) or type(e).__name__
        raise UserError(f"{path} cannot be read: {said}") from e


def open_binary(path: Path) -> Any:
    """Opens a file for reading, unpacked where its name ends with .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


class _Transcoded:
    """A file of another encoding, read as UTF-8. What is not in that encoding becomes bytes that are not UTF-8."""

    def __init__(self, file: IO[bytes], path: Path, encoding: str):
        self._file, self._path, self._encoding = file, path, encoding
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
        self._ended = False

    def read(self, size: int) -> bytes:
        while not self._ended:
            piece = self._file.read(size)
            self._ended = not piece
            try:
                # Lone surrogates stand for what is not text, and are not UTF-8 when they are encoded as such.
                text = self._decoder.decode(piece, final=self._ended).encode("utf-8", "surrogatepass")
            except UnicodeError as e:
                raise UserError(f"{self._path} is not {self._encoding} text") from e
            if text:
                return text
        return b""


def _read_up_to(file: Any, size: int) -> bytes:
    """Reads `size` bytes, or what is left."""
    parts: list[bytes] = []
    while size > 0 and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _fields_of(line: bytes, form: Format) -> list[str]:
    if not _is_utf8(line):
        return []  # It is no header; if it must be one, it is refused.
    text = line.decode().replace(form.delimiter, form.byte)
    quoting = csv_module.QUOTE_MINIMAL if form.quoted else csv_module.QUOTE_NONE
    try:
        return [name.strip() for name in next(csv_module.reader([text], delimiter=form.byte, quoting=quoting), [])]
    except csv_module.Error:
        return []


def _cut(path: Path, form: Format, file: Any, text: bytes, start: int, line: int) -> Iterator[Piece]:
    """Yields pieces, of which the file's first bytes `text` are read already."""
    with readable(path):
        ended = False
        while not ended:
            more = _read_up_to(file, PIECE_BYTES - len(text) if len(text) < PIECE_BYTES else PIECE_BYTES)
            ended = not more
            text += more
            end = len(text) if ended else _end_of_rows(text, form)
            if not end:
                require(len(text) < LONGEST_LINE, f"{path}, line {line}: it is longer than {LONGEST_LINE >> 20} MiB")
                continue
            piece, text = text[:end], text[end:]
            yield Piece(start, line, piece)
            start, line = start + end, line + piece.count(b"\n")


def _end_of_rows(text: bytes, form: Format) -> int:
    """Returns where the last whole row ends, of a text of which more is to come; 0: there is none."""
    if not form.quoted or b'"' not in text:
        return text.rfind(b"\n") + 1
    text = text.removesuffix(b"\r")  # What it is depends on what comes next.
    quotes = _quotes(text)
    if _are_proper(text, quotes, form, whole=False):
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        ends = ends[np.searchsorted(quotes, ends) % 2 == 0]
        return int(ends[-1]) + 1 if len(ends) else 0
    return max((end for _, end, _ in _walk(text, form, whole=False)), default=0)


def _quotes(text: bytes) -> np.ndarray:
    return np.flatnonzero(np.frombuffer(text, np.uint8) == ord('"'))


def _are_proper(text: bytes, quotes: np.ndarray, form: Format, *, whole: bool) -> bool:
    """Whether all rows are well formed but for their number of fields: then parity says what is quoted."""
    if text.count(b"\r") != text.count(b"\r\n"):
        return False
    if not len(quotes):
        return True
    if whole and len(quotes) % 2:
        return False
    codes = np.frombuffer(text, np.uint8)
    opening, closing = quotes[::2], quotes[1::2]
    # Two quotes side by side end no field.
    first, last = np.ones(len(opening), bool), np.ones(len(opening), bool)
    first[1:] = opening[1:] != closing[: len(opening) - 1] + 1
    last[:-1] = first[1:]
    ended = np.append(closing, len(text)) if len(closing) < len(opening) else closing
    if np.any(ended[last] - opening[first] > LONGEST_QUOTED):
        return False
    before = codes[np.maximum(opening - 1, 0)]
    after = codes[np.minimum(closing + 1, len(codes) - 1)]
    ends = (ord(form.delimiter), ord("\n"), ord('"'))
    return bool(
        np.all(np.isin(before, ends) | (opening == 0))
        and np.all(np.isin(after, (*ends, ord("\r"))) | (closing == len(codes) - 1))
    )


def _walk(text: bytes, form: Format, *, whole: bool) -> Iterator[tuple[int, int, bool]]:
    """Yields (start, end, whether it is well formed) of row after row; not of a last one that is still open."""
    separator = re.escape(form.delimiter).encode()
    inside = rb'"(?:[^"\r]|""|\r(?=\n)){0,%d}+' % LONGEST_QUOTED
    field = b"(?:" + inside + b'"|[^\r\n"' + separator + b"]*+)" if form.quoted else b"[^\r\n]*+"
    row = re.compile(field + (b"(?:" + separator + field + b")*+" if form.quoted else b"") + rb"(?:\r?\n|\Z)")
    still_open = re.compile(b"(?:" + field + separator + b")*+" + inside + rb"\Z")
    at = 0
    while at < len(text):
        match, good = row.match(text, at), True
        if match is not None and (whole or text[match.end() - 1 : match.end()] == b"\n"):
            end = match.end()
        elif match is not None:
            return
        else:
            good, end = False, text.find(b"\n", at) + 1
            if not whole and (not end or (form.quoted and still_open.match(text, at))):
                return
            end = end or len(text)
        yield at, end, good
        at = end


def _sift(piece: Piece, form: Format, columns: int) -> tuple[bytes, np.ndarray | None, list[tuple[int, str]]]:
    """Takes out what pyarrow would not parse, or not refuse.

    Returns:
      The text left, with one byte between fields, each row's line (None: a row a line), and the malformed rows.
    """
    text = piece.text
    unit = _UNIT_SEPARATOR.encode() if len(form.delimiter) > 1 else b""
    quotes = _quotes(text) if form.quoted and b'"' in text else np.empty(0, np.int64)
    # pyarrow takes an empty line for a row whose fields are all empty.
    empty = columns > 1 and re.search(rb"(?:\A|\n)\r?\n", text) is not None
    clean = not empty and not (unit and unit in text)
    if clean and _are_proper(text, quotes, form, whole=True) and _is_utf8(text):
        if unit:
            text = text.replace(form.delimiter.encode(), unit)
        if not len(quotes):
            return text, None, []
        ends = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        rows = np.searchsorted(quotes, ends) % 2 == 0
        lines = piece.line + np.concatenate([[0], np.flatnonzero(rows) + 1])
        return text, lines if text[-1:] != b"\n" else lines[:-1], []
    kept, lines, wrong, line = [], [], [], piece.line
    for start, end, good in _walk(text, form, whole=True):
        row = text[start:end]
        if not _is_utf8(row):
            wrong.append((line, f"it is not {form.encoding.upper()} text"))
        elif not good and form.quoted and b'"' in row:
            wrong.append((line, "it has a quote within a field, or one that is not closed"))
        elif not good:
            wrong.append((line, "it has a carriage return within it"))
        elif columns > 1 and not row.strip(b"\r\n"):
            wrong.append((line, f"it is empty, but must have {columns} fields"))
        elif unit and unit in row:
            wrong.append((line, "it holds the byte 0x1f"))
        else:
            kept.append(row.replace(form.delimiter.encode(), unit) if unit else row)
            lines.append(line)
        line += row.count(b"\n")
    return b"".join(kept), np.array(lines, np.int64), wrong


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def parse(
    piece: Piece, path: Path, names: tuple[str, ...], form: Format, types: Mapping[str, Any] | None = None
) -> tuple[Rows, list[tuple[int, str]]]:
    """Parses a piece.

    Args:
      piece: Of `opened`.
      path: For messages.
      names: Of all columns.
      form: How the table is written.
      types: The columns that are wanted, with pyarrow's types of them; None: all, as text. Where a field does not fit
        its type, or is not finite, all columns of the piece are text.

    Returns:
      The well-formed rows, and (line, why) of each of the others.
    """
    arrow, compute, csv = (_import(f"pyarrow{module}") for module in ("", ".compute", ".csv"))
    text, lines, wrong = _sift(piece, form, len(names))
    wanted = dict.fromkeys(names, arrow.string()) if types is None else dict(types)
    if not text:
        return Rows(np.empty(0, np.int64), {name: arrow.array([], arrow.string()) for name in wanted}), wrong
    if text.startswith(codecs.BOM_UTF8):
        text = codecs.BOM_UTF8 + text  # pyarrow passes over one wherever a piece begins.
    refused: list[tuple[int, str]] = []

    def invalid(row: Any) -> str:
        refused.append((int(row.number), f"it has {row.actual_columns} fields, but must have {row.expected_columns}"))
        return "skip"

    def parsed(kinds: Mapping[str, Any]) -> Any:
        refused.clear()
        return csv.read_csv(
            arrow.BufferReader(text),
            read_options=csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=list(names)),
            parse_options=csv.ParseOptions(
                delimiter=form.byte, quote_char='"' if form.quoted else False, invalid_row_handler=invalid,
                newlines_in_values=form.quoted, ignore_empty_lines=False,
            ),
            convert_options=csv.ConvertOptions(
                column_types=kinds, include_columns=list(kinds), strings_can_be_null=False, null_values=[""],
                check_utf8=False,
            ),
        )  # fmt: skip

    table = None
    try:
        table = parsed(wanted)
        reals = (c for c in table.columns if arrow.types.is_floating(c.type))
        if not all(compute.all(compute.is_finite(c), min_count=0).as_py() for c in reals):
            table = None
    except arrow.ArrowInvalid:
        pass
    if table is None:
        table = parsed(dict.fromkeys(wanted, arrow.string()))
    if lines is None:
        lines = piece.line + np.arange(text.count(b"\n") + (text[-1:] != b"\n"))
    if len(lines) != table.num_rows + len(refused):
        raise UserError(
            f"{path}, lines {lines[0]} to {lines[-1]}: they hold {table.num_rows + len(refused)} rows by one count and "
            f"{len(lines)} by another; look for characters there that end lines in other systems"
        )
    kept = np.ones(len(lines), bool)
    for number, why in refused:
        kept[number - 1] = False
        wrong.append((int(lines[number - 1]), why))
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return Rows(lines[kept], columns), sorted(wrong)


def numbers(rows: Rows, name: str, dtype: str, *, empty: float | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """Converts a column to numbers.

    Args:
      rows: Of `parse`.
      name: The column: text, or numbers already.
      dtype: `int64` or `float64`.
      empty: What an empty field means; None: it is malformed.

    Returns:
      Numbers [n], and of each malformed row (its number is 0) why it is.
    """
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    column, n = rows.columns[name], len(rows.lines)
    text = arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type)
    wrong: list[int] = []
    if text:
        column = compute.utf8_trim_whitespace(column)
        blank = np.asarray(compute.equal(column, ""))
        filled = compute.if_else(compute.equal(column, ""), "0", column) if blank.any() else column
        values = _cast(filled, dtype)
        if values is None:  # Some are malformed: one by one.
            values = np.zeros(n, dtype)
            kind, grammar = (int, _INTEGER) if dtype == "int64" else (float, _REAL)
            for i, field in enumerate(filled.to_pylist()):
                try:
                    values[i] = kind(field) if grammar.fullmatch(field) else wrong.append(i) or 0
                except (OverflowError, ValueError):  # More than 64 bits; more digits than Python converts.
                    wrong.append(i)
    else:
        blank = np.asarray(column.is_null())
        values = np.asarray(column.fill_null(0))
        if dtype == "int64":
            # 2^63 is a real, but 2^63 - 1 is none.
            below = values < 2.0**63 if values.dtype.kind == "f" else values <= np.iinfo(np.int64).max
            whole = below & (values >= -(2.0**63)) & (values == np.floor(values))
            wrong = np.flatnonzero(~whole).tolist()
            values = np.where(whole, values, 0)
        values = values.astype(dtype)
    if dtype == "float64":
        wrong += np.flatnonzero(~np.isfinite(values)).tolist()
    if empty is None:
        wrong += np.flatnonzero(blank).tolist()
    elif blank.any():
        values = np.where(blank, empty, values)
    what = "a whole number" if dtype == "int64" else "a number"
    why = {i: f"{name} is {str(column[i].as_py() or '')[:40]!r}, but must be {what}" for i in sorted(set(wrong))}
    if why:
        values = values.copy()
        values[list(why)] = 0
    return values, why


def _cast(column: Any, dtype: str) -> np.ndarray | None:
    """Casts text to numbers; None where some of it is no decimal number."""
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    if dtype == "int64" and compute.any(compute.match_substring(column, "x", ignore_case=True)).as_py():
        return None  # pyarrow would read hexadecimal.
    try:
        return np.asarray(column.cast({"int64": arrow.int64(), "float64": arrow.float64()}[dtype]))
    except arrow.ArrowInvalid:
        return None


def _import(module: str) -> Any:
    return import_package(module, "reading tables of text needs the package pyarrow", "'jaxrec[prepare]'")
