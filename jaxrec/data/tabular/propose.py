"""Looks at a table and writes a schema for it, for its owner to correct.

Shape suffixes: n rows of a piece, K distinct keys.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec.checks import UserError, import_package, require
from jaxrec.data.tabular.files import TableFile, find
from jaxrec.data.tabular.parts import in_threads
from jaxrec.data.tabular.schema import Ids, TableSchema
from jaxrec.data.tabular.text_tables import Rows
from jaxrec.data.tabular.vocabulary import keys_of

# Distinct values are counted exactly up to so many, beyond by the share of hashes that are kept (error about 0.8 %).
SKETCH = 1 << 14
# Bytes of an embedding row that table sizes are shown for.
DIM = 16
_LABELS = (
    "label",
    "click",
    "clicked",
    "is_click",
    "target",
    "y",
    "conversion",
    "converted",
    "liked",
    "purchase",
    "rating",
)
_USERS = ("user", "user_id", "userid", "uid", "visitor_id", "visitorid", "customer_id", "member_id")
_TIMES = ("timestamp", "time", "datetime", "date", "event_time", "created_at", "ts", "hour")
_NUMBER = r"^\s*-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*$"
_ISO = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?$"
_LIST = r"[^|]\|[^|]"


@dataclasses.dataclass
class Seen:
    """What is known of a column.

    Attributes:
      rows: Values, missing ones included.
      missing: Of them, empty ones.
      numbers: That are numbers.
      whole: That are whole numbers.
      dates: That are ISO dates.
      lists: That hold several values separated by `|`.
      low: The least number.
      high: The greatest.
      sketch: uint64, the smallest keys of its values, ascending.
      examples: A few values.
    """

    rows: int = 0
    missing: int = 0
    numbers: int = 0
    whole: int = 0
    dates: int = 0
    lists: int = 0
    low: float = np.inf
    high: float = -np.inf
    sketch: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint64))
    examples: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Adds what another piece has of the column."""
        for name in ("rows", "missing", "numbers", "whole", "dates", "lists"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.sketch = np.unique(np.concatenate([self.sketch, other.sketch]))[: SKETCH + 1]
        self.examples += other.examples[: 3 - len(self.examples)]

    @property
    def is_exact(self) -> bool:
        """Whether `distinct` is exact."""
        return len(self.sketch) <= SKETCH

    @property
    def distinct(self) -> int:
        """Distinct values, by the k-th smallest of uniform hashes where they are many (Bar-Yossef et al. 2002)."""
        if self.is_exact:
            return len(self.sketch)
        return round((SKETCH - 1) / (float(self.sketch[SKETCH - 1]) * 2.0**-64))


def look(files: list[TableFile], *, threads: int) -> tuple[dict[str, Seen], int, int]:
    """Reads a table; returns what is known of each column, its rows, and the malformed rows, which are passed over."""
    tqdm = import_package("tqdm", "looking at tables needs the package tqdm", "tqdm").tqdm
    seen: dict[str, Seen] = {}
    good = wrong = 0
    for file in files:
        with (
            file.opened() as (names, tasks),
            tqdm(desc=f"looking at {file.path.name}", unit="row", file=sys.stderr) as bar,
        ):
            require(not seen or set(names) == set(seen), f"{file.path} has other columns than {files[0].path}")
            for columns, rows, bad in in_threads(_look_at, tasks, threads):
                for name, more in columns.items():
                    seen.setdefault(name, Seen()).add(more)
                good, wrong = good + rows, wrong + bad
                bar.update(rows)
    return seen, good, wrong


def _look_at(task: Any) -> tuple[dict[str, Seen], int, int]:
    parsed = task.parse(None)
    return {name: _column(parsed.rows, name) for name in parsed.rows.columns}, len(parsed.rows.lines), len(parsed.wrong)


def _column(rows: Rows, name: str) -> Seen:
    arrow = import_package("pyarrow", "looking at tables needs the package pyarrow", "'jaxrec[prepare]'")
    compute = import_package("pyarrow.compute", "looking at tables needs the package pyarrow", "'jaxrec[prepare]'")
    column = rows.columns[name]
    several = 0
    if arrow.types.is_list(column.type):
        several = len(column)
        column = column.flatten()
    if arrow.types.is_boolean(column.type):
        column = column.cast(arrow.int8())
    texts = (column if arrow.types.is_string(column.type) else column.cast(arrow.string())).fill_null("")
    encoded = texts.dictionary_encode()
    counts = np.bincount(np.asarray(encoded.indices), minlength=len(encoded.dictionary))
    values = encoded.dictionary

    def matching(pattern: str) -> np.ndarray:
        return np.asarray(compute.match_substring_regex(values, pattern))

    empty = np.asarray(compute.equal(values, ""))
    number = matching(_NUMBER)
    real = np.asarray(compute.utf8_trim_whitespace(values.filter(arrow.array(number))).cast(arrow.float64()))
    real = real[np.isfinite(real)]
    whole = matching(r"^\s*-?[0-9]+\s*$")
    return Seen(
        rows=len(texts),
        missing=int(counts[empty].sum()),
        numbers=int(counts[number].sum()),
        whole=int(counts[whole].sum()),
        dates=int(counts[matching(_ISO)].sum()),
        lists=several or int(counts[matching(_LIST)].sum()),
        low=float(real.min(initial=np.inf)),
        high=float(real.max(initial=-np.inf)),
        sketch=np.unique(keys_of(values))[: SKETCH + 1],
        examples=[v for v in values[:4].to_pylist() if v][:3],
    )


def suggest(name: str, seen: Seen, ids: Ids) -> str:
    """Returns the settings of a column as TOML, and why."""
    lower = name.lower()
    filled = seen.rows - seen.missing
    binary = seen.numbers == filled == seen.rows and {seen.low, seen.high} <= {0.0, 1.0} and seen.distinct == 2
    of_numbers = filled and seen.numbers == filled
    if lower in _LABELS and binary:
        return '{use = "label"}'
    if lower in _LABELS and of_numbers:
        high = seen.low + 0.75 * (seen.high - seen.low)
        return (
            f'{{use = "label", at_least = {round(high) if seen.high - seen.low > 3 else high:g}}}  # where a 1 begins'
        )
    if seen.distinct <= 1:
        return '{use = "ignore"}  # all values are equal'
    if lower in _USERS:
        return '{use = ["user", "categorical"]}'
    if lower in _TIMES and of_numbers and seen.whole == filled:
        return '{use = "time"}  # a number as it is; for dates of other forms: format = "%y%m%d%H"'
    if filled and seen.dates == filled:
        return '{use = "time", format = "iso"}'
    if seen.lists > 0.1 * max(filled, 1):
        return '{use = "bag", separator = "|"}'
    if of_numbers and seen.whole < filled:
        return '{use = "dense"}'
    looks_like_id = re.search(r"((^|_)(id|code|type|cat|category|hash)|[a-z](Id|ID|Code|Type))$|^[cC]\d+$", name)
    if seen.distinct > 0.9 * seen.rows and not (of_numbers and not looks_like_id) and seen.rows > 100:
        return '{use = "ignore"}  # nearly every row has a value of its own'
    if of_numbers and not looks_like_id and (seen.distinct > 50 or re.fullmatch(r"i\d+", lower)):
        return '{use = "dense"}  # or categorical, where the numbers are only names'
    return '{use = "categorical"}'


def propose(path: Path | list[Path], to: Path, *, threads: int, known: TableSchema | None = None) -> None:
    """Writes a schema for the table at `path` to the file `to`, and prints what its columns hold.

    Args:
      path: A file or folder, or files of one.
      to: The file to be written.
      threads: That read.
      known: Says how the files are written and split, where that is known.

    Raises:
      UserError: The table cannot be read, or the file not be written.
    """
    files = find(path, known)
    path = path if isinstance(path, Path) else path[0].parent
    seen, rows, wrong = look(files, threads=threads)
    require(rows > 0, f"--input is {str(path)!r}, which has no rows")
    ids = Ids()
    suggested = {name: suggest(name, of, ids) for name, of in seen.items()}
    for c in () if known is None else known.of("categorical"):
        if c.hex_digits and "ignore" not in suggested[c.name]:
            suggested[c.name] = f'{{use = "categorical", hex_digits = {c.hex_digits}}}'
    uses = {name: text.split('"')[1] for name, text in suggested.items()}
    width = max(map(len, seen))
    print(f"{rows:,} rows{f', and {wrong:,} that are malformed' if wrong else ''}, in {len(files)} file(s)")
    print(f"{'column':<{width}}  {'distinct':>11}  {'missing':>8}  {'table':>10}  proposal")
    lines = []
    for name, of in seen.items():
        table = ""
        if uses[name] in ("categorical", "user", "bag"):
            table = f"{min(of.distinct + 1, ids.max_rows) * DIM * 4 / 2**20:,.1f} MiB"
        about = f"{'' if of.is_exact else '~'}{of.distinct:,}"
        print(f"{name:<{width}}  {about:>11}  {of.missing / max(of.rows, 1):>8.2%}  {table:>10}  {suggested[name]}")
        example = ", ".join(repr(e[:20]) for e in of.examples[:2])
        extra = f"{about} values, {of.missing / max(of.rows, 1):.2%} missing, such as {example}"
        told, _, why = suggested[name].partition("  # ")
        lines.append(f"{_key(name)} = {told}  # {f'{why}; ' if why else ''}{extra}")
    print(f"(table: bytes at embedding.dim={DIM} in float32, if every value had a row)")
    split = (
        '"time"  # the latest rows are held out' if "time" in uses.values() else '"order"  # the last rows; or "random"'
    )
    split = f'"{known.split.by}"' if known else split
    validation, test = (known.split.validation, known.split.test) if known else (0.1, 0.1)
    head = [
        "# Proposed by looking at the table: correct it. What each setting means is told in",
        "# jaxrec/data/tabular/schema.py; a column that is left out is not read.",
        f'name = "{known.name if known else re.sub(r"[^A-Za-z0-9_-]", "_", path.name.split(".")[0]) or "table"}"',
        "",
        *_of_files(files[0]),
        "[split]",
        f"by = {split}",
        f"validation = {validation:.6g}",
        f"test = {test:.6g}",
        "",
        "[ids]",
        f'vocabulary = "{ids.vocabulary}"  # or "hash"',
        f"min_count = {ids.min_count}  # rarer values share row 0",
        f"max_rows = {ids.max_rows}",
        "",
        "[columns]",
    ]
    try:
        to.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    except OSError as e:
        raise UserError(f"--schema is {str(to)!r}, which cannot be written: {e.strerror}") from e
    print(f"schema      {to}")
    if "label" not in uses.values():
        print('label       none was recognised: give a column {use = "label"} before preparing')


def _of_files(file: TableFile) -> list[str]:
    form = file.form
    if form is None:
        return []
    names = [] if form.names is None else [f"names = [{', '.join(map(_text, form.names))}]"]
    quoted = [] if form.quoted else ["quoted = false"]
    quoted += [f"optional_fields = {form.optional}"] if form.optional else []
    return ["[files]", f"delimiter = {_text(form.delimiter)}", *names, *quoted, ""]


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'


def _key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in name)
    return f'"{escaped}"'
