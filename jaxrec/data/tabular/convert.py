"""From the rows of a piece of a table to arrays: numbers as they will be used, text as keys of its values.

Shape suffixes: n rows, T labels, N dense columns, K distinct values of a column in the piece, v values of a bag column.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, require
from jaxrec.data.tabular.files import Parsed
from jaxrec.data.tabular.schema import SPLITS, TableColumn, TableSchema
from jaxrec.data.tabular.text_tables import Rows, numbers
from jaxrec.data.tabular.vocabulary import keys_of

_HEXADECIMAL = np.zeros(256, bool)
_HEXADECIMAL[list(b"0123456789abcdefABCDEF")] = True
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Values(NamedTuple):
    """A column of text.

    Attributes:
      keys: uint64 [K], of its distinct values.
      codes: unsigned [n], or [v] of a bag: which of them.
      lengths: int32 [n], values of each row of a bag; else None.
    """

    keys: np.ndarray
    codes: np.ndarray
    lengths: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """The well-formed rows of a piece.

    Attributes:
      labels: float32 [n, T], auxiliary ones included.
      dense: float32 [n, N], transformed but for `standard` columns; NaN where a value is missing.
      values: By column, of every column of use categorical, bag or user.
      weight: float32 [n], or None.
      time: int64 [n], or None.
      split: uint8 [n], an index of SPLITS, where a column says which; or None.
    """

    labels: np.ndarray
    dense: np.ndarray
    values: dict[str, Values]
    weight: np.ndarray | None = None
    time: np.ndarray | None = None
    split: np.ndarray | None = None

    @property
    def rows(self) -> int:
        """n."""
        return len(self.labels)


def types_of(schema: TableSchema) -> dict[str, Any]:
    """The types of the columns that a text table is parsed to."""
    arrow = _import("pyarrow")
    types = {}
    for c in schema.columns:
        if {"categorical", "user"} & set(c.use):
            types[c.name] = arrow.dictionary(arrow.int32(), arrow.string())
        elif "dense" in c.use or "weight" in c.use or ({"label", "auxiliary"} & set(c.use) and c.positive is None):
            types[c.name] = arrow.float64()
        elif c.use != ("ignore",):
            types[c.name] = arrow.string()
    return types


def convert(parsed: Parsed, schema: TableSchema) -> tuple[Part, list[tuple[int, str]]]:
    """Makes a part of parsed rows; returns it, and (line, why) of the malformed rows."""
    rows, wrong = parsed.rows, list(parsed.wrong)
    for c in schema.columns:
        one = c.use != ("ignore",) and "bag" not in c.use
        lists = one and _import("pyarrow").types.is_list(rows.columns[c.name].type)
        require(not lists, f"column {c.name!r} holds lists, but is of use {', '.join(c.use)}; only a bag takes them")
    bad: dict[int, str] = {}
    n = len(rows.lines)

    def real(name: str, empty: float | None) -> np.ndarray:
        values, why = numbers(_as_numbers(rows, name), name, "float64", empty=empty)
        for i, said in why.items():
            bad.setdefault(i, said)
        return values

    def refuse(which: np.ndarray, say: Callable[[int], str]) -> None:
        for i in np.flatnonzero(which).tolist():
            bad.setdefault(i, say(i))

    labels = np.empty((n, len(schema.of("label", "auxiliary"))), np.float32)
    for t, c in enumerate(schema.of("label") + schema.of("auxiliary")):
        if c.positive is not None:
            texts = _as_text(rows.columns[c.name])
            labels[:, t] = np.asarray(_import("pyarrow.compute").equal(texts, c.positive))
            continue
        values = real(c.name, None)
        if c.at_least is None:
            refuse((values != 0) & (values != 1), lambda i, v=values, c=c: f"{c.name} is {v[i]:g}, but must be 0 or 1")
        labels[:, t] = values >= (1 if c.at_least is None else c.at_least)
    dense = np.empty((n, len(schema.of("dense"))), np.float32)
    for i, c in enumerate(schema.of("dense")):
        values = real(c.name, 0.0)
        values = np.where(_is_missing(rows.columns[c.name]), np.nan, values)
        if c.transform == "log":
            values = np.copysign(np.log1p(np.abs(values)), values)
        with np.errstate(over="ignore"):  # What float32 cannot hold becomes infinite, and is refused.
            dense[:, i] = values
        refuse(np.isinf(dense[:, i]), lambda i, v=values, c=c: f"{c.name} is {v[i]:g}, which is beyond float32")
    weight = None
    for c in schema.of("weight"):
        values = real(c.name, None)
        with np.errstate(over="ignore"):
            weight = values.astype(np.float32)
        refuse(np.isinf(weight), lambda i, v=values, c=c: f"{c.name} is {v[i]:g}, which is beyond float32")
        refuse(values < 0, lambda i, v=values, c=c: f"{c.name} is {v[i]:g}, but a weight must be at least 0")
    time = None
    for c in schema.of("time"):
        time, why = _times(rows, c)
        for i, said in why.items():
            bad.setdefault(i, said)
    split = None
    if schema.split.by == "column":
        (c,) = schema.of("split")
        texts = _as_text(rows.columns[c.name]).to_pylist()
        split = np.array([SPLITS.index(t) if t in SPLITS else len(SPLITS) for t in texts], np.uint8)
        refuse(
            split == len(SPLITS),
            lambda i, c=c: f"{c.name} is {texts[i][:40]!r}, but must be one of {', '.join(SPLITS)}",
        )
    for c in schema.of("categorical"):
        if c.hex_digits:
            digits, column = f"{c.hex_digits} hexadecimal digits", _encoded(rows.columns[c.name])
            other = ~_are_hexadecimal(column.dictionary, c.hex_digits)
            other = other[np.asarray(column.indices)] if other.any() else np.zeros(n, bool)
            refuse(other, lambda i, c=c, v=column, d=digits: f"{c.name} is {v[i].as_py()[:40]!r}, but must be {d}")
    kept = np.ones(n, bool)
    kept[list(bad)] = False
    wrong += [(int(rows.lines[i]), said) for i, said in bad.items()]
    rows = rows.without(~kept)
    values = {c.name: _values(rows.columns[c.name], c) for c in schema.of("categorical", "bag", "user")}
    if bad:
        labels, dense = labels[kept], dense[kept]
        weight, time, split = (None if a is None else a[kept] for a in (weight, time, split))
    return Part(labels, dense, values, weight, time, split), sorted(wrong)


def _as_numbers(rows: Rows, name: str) -> Rows:
    """A label may be of true and false, or a column of several uses be parsed to distinct texts."""
    arrow = _import("pyarrow")
    column = rows.columns[name]
    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int64())
    elif arrow.types.is_dictionary(column.type) or not (
        arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)
    ):
        column = _as_text(column)
    elif arrow.types.is_floating(column.type):
        # A parquet file may hold NaN where a value is missing.
        column = _import("pyarrow.compute").if_else(_import("pyarrow.compute").is_nan(column), None, column)
    return Rows(rows.lines, {name: column})


def _is_missing(column: Any) -> np.ndarray:
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    if arrow.types.is_integer(column.type) or arrow.types.is_boolean(column.type):
        return np.asarray(column.is_null())
    if arrow.types.is_floating(column.type):
        return np.asarray(column.is_null(nan_is_null=True))
    return np.asarray(compute.equal(compute.utf8_trim_whitespace(_as_text(column)), ""))


def _as_text(column: Any) -> Any:
    """Returns a pyarrow string array; what is missing is an empty text."""
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    if arrow.types.is_floating(column.type):
        column = compute.if_else(compute.is_nan(column), None, column)
    return (column if arrow.types.is_string(column.type) else column.cast(arrow.string())).fill_null("")


def _times(rows: Rows, column: TableColumn) -> tuple[np.ndarray, dict[int, str]]:
    """Returns int64 [n], as given, or microseconds since 1970 for dates; and why rows are malformed."""
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    values = rows.columns[column.name]
    if column.format == "number":
        return numbers(_as_numbers(rows, column.name), column.name, "int64")
    if arrow.types.is_temporal(values.type):
        dates = _microseconds(values)
    else:
        text = compute.utf8_trim_whitespace(_as_text(values))
        dates = _iso(text) if column.format == "iso" else _dates(text, column)
    bad = np.flatnonzero(np.asarray(dates.is_null()))
    what = "a date" if column.format == "iso" else f"a date like {column.format}"
    why = {int(i): f"{column.name} is {_shown(values[int(i)])[:40]!r}, but must be {what}" for i in bad}
    return np.asarray(dates.cast(arrow.int64()).fill_null(0)), why


def _shown(value: Any) -> str:
    try:
        return str(value)
    except OverflowError:  # Python has no such date.
        return str(value.value)


def _microseconds(values: Any) -> Any:
    """Returns dates of parquet in microseconds; null where they do not fit."""
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    unit = getattr(values.type, "unit", "")
    factor = {"s": 1_000_000, "ms": 1_000}.get(unit)
    if factor is None:
        return values.cast(arrow.timestamp("us"), safe=False)
    numbers_of = values.cast(arrow.int64())
    fits = compute.less_equal(compute.abs(numbers_of), (2**63 - 1) // factor)
    return compute.if_else(fits, numbers_of, None).cast(values.type).cast(arrow.timestamp("us"))


def _dates(text: Any, column: TableColumn) -> Any:
    """Parses dates by a pattern; null where a text is none.

    pyarrow's parser is fast, but takes February 30 for March 2 and passes over fields that it does not know. So its
    dates are written again, and where that is not the text, Python's parser decides.
    """
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    pattern, seconds = column.format, arrow.timestamp("s")
    encoded = text.dictionary_encode()
    distinct = encoded.dictionary
    try:
        dates = compute.strptime(distinct, format=pattern, unit="s", error_is_null=True)
        again = compute.strftime(dates.cast(seconds), format=pattern)
        same = np.asarray(compute.equal(again, distinct).fill_null(False))
    except arrow.ArrowException:
        dates, same = arrow.nulls(len(distinct), seconds), np.zeros(len(distinct), bool)
    values = np.where(same, np.asarray(dates.cast(arrow.int64()).fill_null(0)), 0) * 1_000_000
    none = np.zeros(len(distinct), bool)
    for i in np.flatnonzero(~same).tolist():
        try:
            date = datetime.datetime.strptime(distinct[i].as_py(), pattern)
            date = date.replace(tzinfo=date.tzinfo or datetime.UTC)
            values[i] = (date - _EPOCH) // datetime.timedelta(microseconds=1)
        except (ValueError, OverflowError) as e:
            none[i] = True
            if "directive" in str(e) or "stray %" in str(e):
                raise UserError(
                    f"columns.{column.name}.format is {pattern!r}, but must be one of strptime ({e})"
                ) from e
    return arrow.array(values, arrow.int64(), mask=none).take(encoded.indices).cast(arrow.timestamp("us"))


def _iso(text: Any) -> Any:
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    try:
        dates = text.cast(arrow.timestamp("us"))
        # Python has no year 0.
        return compute.if_else(compute.less(compute.year(dates), 1), None, dates)
    except arrow.ArrowInvalid:
        values: list[int | None] = []
        for field in text.to_pylist():
            try:
                date = datetime.datetime.fromisoformat(field)
                date = date.replace(tzinfo=date.tzinfo or datetime.UTC)
                values.append((date - _EPOCH) // datetime.timedelta(microseconds=1))
            except (ValueError, OverflowError):
                values.append(None)
        return arrow.array(values, arrow.int64()).cast(arrow.timestamp("us"))


def _encoded(column: Any) -> Any:
    """Returns distinct texts, and which of them each row has."""
    arrow = _import("pyarrow")
    if arrow.types.is_dictionary(column.type) and not column.null_count:
        return column
    return _as_text(column).dictionary_encode()


def _are_hexadecimal(texts: Any, digits: int) -> np.ndarray:
    """Whether each of distinct texts, [K], is so many lowercase or uppercase digits, or empty."""
    _, offsets, data = texts.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(texts) + 1, texts.offset * 4)
    codes = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    others = np.concatenate([[0], np.cumsum(~_HEXADECIMAL[codes[: bounds[-1]]])])
    lengths = np.diff(bounds)
    return ((lengths == 0) | (lengths == digits)) & (others[bounds[1:]] == others[bounds[:-1]])


def _values(column: Any, spec: TableColumn) -> Values:
    arrow, compute = _import("pyarrow"), _import("pyarrow.compute")
    lengths = None
    if "bag" in spec.use:
        if not arrow.types.is_list(column.type):
            column = compute.split_pattern(_as_text(column), spec.separator)
        offsets = np.asarray(column.offsets).astype(np.int64)
        # A null of a list array may cover values.
        empty = np.asarray(column.is_null())
        flat = _as_text(column.values.slice(offsets[0], offsets[-1] - offsets[0]))
        full = np.asarray(compute.not_equal(flat, ""))
        full &= ~np.repeat(empty, np.diff(offsets))
        total = np.concatenate([[0], np.cumsum(full)])
        bounds = offsets - offsets[0]
        lengths = (total[bounds[1:]] - total[bounds[:-1]]).astype(np.int32)
        column = flat.filter(arrow.array(full))
    column = _encoded(column)
    keys = keys_of(column.dictionary)
    small = np.min_scalar_type(max(len(keys) - 1, 0))
    return Values(keys, np.asarray(column.indices).astype(small), lengths)


def _import(module: str) -> Any:
    return import_package(module, "preparing tables needs the package pyarrow", "'jaxrec[prepare]'")
