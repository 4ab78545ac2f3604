"""Tables of delimited text as they are found: plain or .gz, every malformed row named by file and line.

`text_rows` finds the rows. Here they are parsed to columns; one with another number of fields than the columns is
malformed too. Fields are text, or what the caller names for their columns; `numbers` converts them and names what is
no number.
"""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, require
from jaxrec.data.tabular.text_rows import Format, Piece, opened, sift

_INTEGER = re.compile(r"-?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


@dataclasses.dataclass
class BadRows:
    """Counts malformed rows, and ends the reading where there are more than are allowed.

    Attributes:
      most: How many are allowed: `--max_bad_rows`.
      count: How many there were.
      first: The first few, in words.
      padded: Well-formed rows that lacked optional fields.
    """

    most: int = 0
    count: int = 0
    padded: int = 0
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
    """Rows of a table.

    Attributes:
      lines: int64 [n], each row's line in the file, from 1.
      columns: Name -> pyarrow array [n]; of text, an empty field is an empty string; of numbers, it is null.
      padded: Rows among them that lacked optional fields.
    """

    lines: np.ndarray
    columns: dict[str, Any]
    padded: int = 0

    def without(self, bad: np.ndarray) -> Rows:
        """Returns the rows where `bad`, bool [n], is not set."""
        if not bad.any():
            return self
        keep = _import("pyarrow").array(~bad)
        return self._replace(
            lines=self.lines[~bad], columns={name: column.filter(keep) for name, column in self.columns.items()}
        )


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
    text, lines, wrong = sift(piece, form, len(names))
    wanted = dict.fromkeys(names, arrow.string()) if types is None else dict(types)
    if not text:
        return Rows(np.empty(0, np.int64), {name: arrow.array([], arrow.string()) for name in wanted}), wrong
    if text.startswith(codecs.BOM_UTF8):
        text = codecs.BOM_UTF8 + text  # pyarrow passes over one wherever a piece begins.
    refused: list[tuple[int, int]] = []  # rows, from 1, and how many fields each has

    def invalid(row: Any) -> str:
        refused.append((int(row.number), row.actual_columns))
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

    table, padded = None, 0
    try:
        table = parsed(wanted)
        short = {number - 1: len(names) - has for number, has in refused if 0 < len(names) - has <= form.optional}
        if short:
            text, padded = _padded(text, short, form.byte.encode()), len(short)
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
    must = f"{max(len(names) - form.optional, 1)} to {len(names)}" if form.optional else f"{len(names)}"
    for number, has in refused:
        kept[number - 1] = False
        wrong.append((int(lines[number - 1]), f"it has {has} fields, but must have {must}"))
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    return Rows(lines[kept], columns, padded), sorted(wrong)


def _padded(text: bytes, short: Mapping[int, int], separator: bytes) -> bytes:
    """Adds to rows, which are a line each, the empty fields that they lack."""
    lines = text.split(b"\n")
    for number, fields in short.items():
        lines[number] = lines[number].removesuffix(b"\r") + separator * fields
    return b"\n".join(lines)


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
