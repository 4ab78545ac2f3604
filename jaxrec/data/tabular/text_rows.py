"""The rows of delimited text: where they begin and end, and which of them are malformed.

A file is cut into pieces that end where rows end, one after the other (`opened`); pieces can then be parsed in any
order and by any thread. What a row is does not depend on where pieces end. A row is malformed where it is not text of
the file's encoding, is empty, or holds a quote or a carriage return where the format has none; the row after it begins
on the next line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv as csv_module
import dataclasses
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, require

# Bytes of text that are parsed at a time.
PIECE_BYTES = 8 << 20
# A quoted field may hold line ends. One of more bytes than this was never closed.
LONGEST_QUOTED = 1 << 20
# Neither a table's first line nor any other is as long as this.
LONGEST_FIRST_LINE = 1 << 20
LONGEST_LINE = 64 << 20
# Stands for a separator of two bytes.
_UNIT_SEPARATOR = "\x1f"


@dataclasses.dataclass(frozen=True)
class Format:
    """How a table is written.

    Attributes:
      delimiter: Between the fields: one byte, or `::`.
      names: Of the columns; None: the first line has them. Where a first line repeats them, it is passed over.
      encoding: Of the text.
      quoted: Whether a field may be in double quotes; not with a delimiter of two bytes.
      optional: How many of a row's last fields may be absent, and are then empty; not where fields may be quoted.
    """

    delimiter: str = ","
    names: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    quoted: bool = True
    optional: int = 0

    def __post_init__(self):
        single = len(self.delimiter.encode()) == 1 and self.delimiter not in '\r\n"\0'
        require(
            single or self.delimiter == "::",
            f"the delimiter is {self.delimiter!r}, but must be an ASCII character (no quote, no line end) or ::",
        )
        require(single or not self.quoted, "with the delimiter :: no field can be quoted")
        require(
            self.optional == 0 or not self.quoted,
            f"optional_fields is {self.optional}, but must be 0 where fields may be quoted",
        )
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
            require(
                not twice,
                f"{path}: its first line names column {(twice or [''])[0]!r} twice; if it is a row, give the "
                "columns' names in files.names of the schema",
            )
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
    if b"\r" in text and text.count(b"\r") != text.count(b"\r\n"):
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


def sift(piece: Piece, form: Format, columns: int) -> tuple[bytes, np.ndarray | None, list[tuple[int, str]]]:
    """Takes out what pyarrow would not parse, or not refuse.

    Returns:
      The text left, with one byte between fields, each row's line (None: a row a line), and the malformed rows.
    """
    text = piece.text
    unit = _UNIT_SEPARATOR.encode() if len(form.delimiter) > 1 else b""
    quotes = _quotes(text) if form.quoted and b'"' in text else np.empty(0, np.int64)
    # pyarrow takes an empty line for a row whose fields are all empty.
    empty = columns > 1 and (text.startswith((b"\n", b"\r\n")) or b"\n\n" in text or b"\n\r\n" in text)
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
