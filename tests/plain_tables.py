"""Tables read row by row in plain Python: what `text_tables` must find, however it cuts and parses."""

from __future__ import annotations

from typing import NamedTuple


class Plain(NamedTuple):
    """Rows of a table.

    Attributes:
      lines: Of the well-formed rows.
      fields: Of each well-formed row.
      bad: Lines of the malformed rows.
    """

    lines: list[int]
    fields: list[list[str]]
    bad: list[int]


def rows_of(data: bytes, delimiter: str, columns: int, line: int, *, quoted: bool, longest_quoted: int) -> Plain:
    """Reads the rows after the header, one byte after the other.

    Args:
      data: UTF-8 that may be anything else.
      delimiter: Between fields.
      columns: Fields of a row.
      line: The first row's.
      quoted: Whether fields may be quoted.
      longest_quoted: Bytes of a quoted field at most, two quotes being one.
    """
    found, at = Plain([], [], []), 0
    while at < len(data):
        fields, end = _row(data, at, delimiter.encode(), quoted, longest_quoted)
        if fields is None:
            newline = data.find(b"\n", at)
            end = len(data) if newline < 0 else newline + 1
        texts = None if fields is None or (len(delimiter) > 1 and b"\x1f" in data[at:end]) else _decoded(fields)
        if texts is None or len(texts) != columns:
            found.bad.append(line)
        else:
            found.lines.append(line)
            found.fields.append(texts)
        line += data.count(b"\n", at, end)
        at = end
    return found


def _row(data: bytes, at: int, delimiter: bytes, quoted: bool, longest_quoted: int) -> tuple[list[bytes] | None, int]:
    """Returns the fields of the row at `at` and where the next begins; None: it is not well formed."""
    fields = []
    while True:
        if quoted and data[at : at + 1] == b'"':
            field, at = _in_quotes(data, at + 1, longest_quoted)
            if field is None:
                return None, at
        else:
            begin = at
            while at < len(data) and data[at : at + len(delimiter)] != delimiter and data[at] not in b"\r\n":
                if quoted and data[at] == ord('"'):
                    return None, at
                at += 1
            field = data[begin:at]
        fields.append(field)
        if data[at : at + len(delimiter)] == delimiter:
            at += len(delimiter)
            continue
        for end in (b"\r\n", b"\n"):
            if data[at : at + len(end)] == end:
                return fields, at + len(end)
        return (fields, at) if at == len(data) else (None, at)


def _in_quotes(data: bytes, at: int, longest: int) -> tuple[bytes | None, int]:
    """Returns the text from `at` to the quote that closes it, and where it goes on behind that."""
    text = bytearray()
    length = 0
    while at < len(data):
        if data[at] == ord('"'):
            if data[at + 1 : at + 2] != b'"':
                return bytes(text), at + 1
            at += 1
        elif data[at] == ord("\r") and data[at + 1 : at + 2] != b"\n":
            break
        text.append(data[at])
        at += 1
        length += 1
        if length > longest:
            break
    return None, at


def _decoded(fields: list[bytes]) -> list[str] | None:
    try:
        return [field.decode() for field in fields]
    except UnicodeDecodeError:
        return None
