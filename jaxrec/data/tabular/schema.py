"""What the columns of a table are for, as a TOML file says it.

    name = "clicks"                                        # of the prepared data set; may be left out

    [files]                                                # all may be left out
    delimiter = ","                                        # else taken from the first line
    names = ["click", "hour", "site", "price"]             # where no first line has them
    encoding = "utf-8"
    quoted = true
    optional_fields = 0                                    # of a row's last fields; absent ones are missing values
    train = "train.csv"                                    # of a folder; with split.by = "files"

    [split]
    by = "order"                                           # time, random, user, files, last_file, column
    validation = 0.1
    test = 0.1

    [ids]                                                  # of every table, unless its column says otherwise
    vocabulary = "frequency"                               # or hash
    min_count = 2
    max_rows = 1000000

    [columns]
    click = {use = "label"}
    hour = {use = "time", format = "%y%m%d%H"}
    site = {use = "categorical", min_count = 10}
    price = {use = "dense", transform = "log"}

`USES` says what each use takes. A column that is not named is not read.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrec.checks import UserError, one_of, require
from jaxrec.data.schema import COMBINERS, SPLITS
from jaxrec.data.tabular.text_rows import Format

# Ids of a feature that a row may have: a batch has room for as many of every row.
LONGEST = 100_000
RULES = ("order", "time", "random", "user", "files", "last_file", "column")
VOCABULARIES = ("frequency", "hash")
TRANSFORMS = ("log", "standard", "none")

# Of a time column: kinds of dates that are no pattern of strptime.
TIMES = ("number", "iso")
# No column can be used for two of these.
_APART = (
    {"label", "auxiliary"}, {"bag", "categorical"}, {"bag", "user"},
    # A label that is a feature too is known beforehand.
    *({a, b} for a in ("label", "auxiliary") for b in ("dense", "categorical", "bag")),
)  # fmt: skip
_IDS = ("table", "vocabulary", "min_count", "max_rows", "combiner")
# What a column may be used for, and the settings that each use takes.
USES: dict[str, tuple[str, ...]] = {
    "label": ("at_least", "positive"),
    "auxiliary": ("at_least", "positive"),
    "weight": (),
    "dense": ("transform",),
    "categorical": (*_IDS, "history", "hex_digits"),
    "bag": (*_IDS, "separator", "max_length"),
    "user": (),
    "time": ("format",),
    "split": (),
    "ignore": (),
}


@dataclasses.dataclass(frozen=True)
class Ids:
    """How the values of a table become rows of it.

    Attributes:
      vocabulary: `frequency`: the most frequent values of the training split have rows of their own, all others share
        row 0. `hash`: a value's row is its hash modulo `max_rows`.
      min_count: Occurrences in the training split that a row of its own takes.
      max_rows: Rows at most, row 0 included.
    """

    vocabulary: str = "frequency"
    min_count: int = 2
    max_rows: int = 1_000_000


@dataclasses.dataclass(frozen=True)
class TableColumn:
    """A column of the table and what it is for.

    Attributes:
      name: As the table has it.
      use: Of `USES`; several, where one column serves twice (a user that is a feature too).
      at_least: A label is 1 where the number is at least this.
      positive: A label is 1 where the text is this, 0 where it is another or missing. With neither, it must be 0 or 1.
      transform: Of a dense column: `log` (sign(x) log(1 + |x|), which no finite x makes infinite), `standard` (minus
        the training split's mean, divided by its deviation), `none`. A missing value is 0 after it.
      table: The embedding table; columns may share one. The column's name where it is empty.
      ids: How its values become ids.
      combiner: Of a bag or history.
      history: Events of the user's past whose values of this column are a feature too; 0: none.
      separator: Between the values of a bag.
      max_length: Values of a bag that are used.
      format: Of a time: `number`, `iso`, or as of strptime.
      hex_digits: Values are so many hexadecimal digits or missing; others are malformed. 0: they may be any text.
    """

    name: str
    use: tuple[str, ...]
    at_least: float | None = None
    positive: str | None = None
    transform: str = "log"
    table: str = ""
    ids: Ids = Ids()
    combiner: str = "mean"
    history: int = 0
    separator: str = "|"
    max_length: int = 16
    format: str = "number"
    hex_digits: int = 0


@dataclasses.dataclass(frozen=True)
class Split:
    """Which rows are for training, validation and test.

    Attributes:
      by: `order`: the last rows of the files, in their order. `time`: the latest; equal times stay together. `random`:
        drawn by the row's number. `user`: drawn by the user. `files`: as `[files]` names them. `last_file`: the last
        file, its first half for validation. `column`: as the column of use `split` says.
      validation: The share of rows (of users) that are for validation.
      test: For test.
      seed: Of `random` and `user`.
    """

    by: str = "order"
    validation: float = 0.1
    test: float = 0.1
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TableSchema:
    """All that a schema file says.

    Attributes:
      name: Of the data set that is prepared; empty: the input's.
      columns: Those that are used.
      split: The rule.
      delimiter: Of the files; empty: it is taken from the first line.
      names: Of the columns, where no first line has them.
      encoding: Of the files.
      quoted: Whether fields may be in double quotes.
      optional_fields: How many of a row's last fields may be absent; their values are then missing.
      files: By split, names of files in the input's folder.
    """

    name: str
    columns: tuple[TableColumn, ...]
    split: Split = Split()
    delimiter: str = ""
    names: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    quoted: bool = True
    optional_fields: int = 0
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def of(self, *uses: str) -> tuple[TableColumn, ...]:
        """Returns the columns of any of these uses, in order."""
        return tuple(c for c in self.columns if set(uses) & set(c.use))

    @property
    def tables(self) -> dict[str, tuple[TableColumn, ...]]:
        """The embedding tables and the columns that read each."""
        tables: dict[str, tuple[TableColumn, ...]] = {}
        for c in self.of("categorical", "bag"):
            tables[c.table] = (*tables.get(c.table, ()), c)
        return tables

    def check(self, where: str) -> None:
        """Raises `UserError` unless a data set can be prepared by it; `where` names the file."""
        names = [c.name for c in self.columns]
        for use in ("weight", "user", "time", "split"):
            have = [c.name for c in self.of(use)]
            require(len(have) < 2, f"{where}: columns {', '.join(have)} are of use {use}, but only one may be")
        require(bool(self.of("label")), f"{where}: no column is of use label, but one must be: {', '.join(names)}")
        require(
            bool(self.of("dense", "categorical", "bag")),
            f"{where}: no column is of use dense, categorical or bag, so there is nothing to learn from",
        )
        needed = {"time": "time", "user": "user", "column": "split"}.get(self.split.by)
        require(
            needed is None or bool(self.of(needed)),
            f"{where}: split.by is {self.split.by!r}, but no column is of use {needed}",
        )
        if self.split.by == "files":
            missing = [s for s in SPLITS if s not in self.files]
            require(not missing, f"{where}: split.by is 'files', but files.{(missing or [''])[0]} is not given")
        if any(c.history for c in self.columns):
            require(
                bool(self.of("user")) and bool(self.of("time")),
                f"{where}: a history needs a column of use user and one of use time",
            )
        for c in self.columns:
            other = f"{c.name}_history"
            require(
                not c.history or other not in names,
                f"{where}: the history of column {c.name} is feature {other}, but there is a column of that name",
            )
        for table, columns in self.tables.items():
            for c in columns[1:]:
                require(
                    c.ids == columns[0].ids,
                    f"{where}: columns {columns[0].name} and {c.name} share table {table!r}, so their vocabulary, "
                    "min_count and max_rows must be equal",
                )


def load(path: Path, **overrides: Any) -> TableSchema:
    """Reads a schema file.

    Args:
      path: Of the file.
      **overrides: Settings of `[ids]` that replace the file's, where they are not None.

    Raises:
      UserError: It is absent, is not TOML, or says something that has no meaning.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"--schema is {str(path)!r}, which does not exist; --propose writes one for the table"
        ) from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"--schema is {str(path)!r}, which cannot be read as text: {e}") from e
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # Numbers of more digits than Python converts; lists in lists in lists.
        raise UserError(f"{path} is not TOML: {e}") from e
    return parse(values, str(path), **overrides)


def parse(values: Mapping[str, Any], where: str, **overrides: Any) -> TableSchema:
    """Makes a schema of what a TOML file holds; see `load`."""
    _known(values, ("name", "files", "split", "ids", "columns"), where, "")
    files = dict(_typed(values, "files", dict, where, {}))
    _known(files, ("delimiter", "names", "encoding", "quoted", "optional_fields", *SPLITS), where, "files.")
    split = _filled(Split(), _typed(values, "split", dict, where, {}), where, "split.")
    one_of(f"{where}: split.by", split.by, RULES)
    for name in ("validation", "test"):
        share = getattr(split, name)
        require(0 < share < 1, f"{where}: split.{name} is {share}, but must lie between 0 and 1")
    require(0 <= split.seed < 2**63, f"{where}: split.seed is {split.seed}, but must be at least 0 and below 2^63")
    require(
        split.validation + split.test < 1,
        f"{where}: split.validation and split.test are {split.validation} and {split.test}: no rows are left",
    )
    ids = _filled(Ids(), _typed(values, "ids", dict, where, {}), where, "ids.")
    _check_ids(ids, f"{where}: ids")
    ids = dataclasses.replace(ids, **{k: v for k, v in overrides.items() if v is not None})
    described = _typed(values, "columns", dict, where, {})
    require(bool(described), f"{where}: [columns] says of no column what it is for; --propose writes such a file")
    schema = TableSchema(
        name=_typed(values, "name", str, where, ""),
        columns=tuple(_column(name, of_column, ids, where) for name, of_column in described.items()),
        split=split,
        delimiter=_typed(files, "delimiter", str, where, "", "files."),
        names=tuple(_texts(files, "names", where)) if "names" in files else None,
        encoding=_typed(files, "encoding", str, where, "utf-8", "files."),
        quoted=_typed(files, "quoted", bool, where, True, "files."),
        optional_fields=_typed(files, "optional_fields", int, where, 0, "files."),
        files={s: _typed(files, s, str, where, "", "files.") for s in SPLITS if s in files},
    )
    check_name(f"{where}: name", schema.name)
    require(
        schema.optional_fields >= 0,
        f"{where}: files.optional_fields is {schema.optional_fields}, but must be at least 0",
    )
    try:
        quoted = schema.quoted and schema.delimiter != "::"
        Format(schema.delimiter or ",", schema.names, schema.encoding, quoted, schema.optional_fields)
    except UserError as e:
        raise UserError(f"{where}: {e}") from e
    schema.check(where)
    return schema


def check_name(what: str, name: str) -> None:
    """Raises `UserError` unless a data set can have the name; `what` says where it is given. It may be empty."""
    good = all(c.isalnum() or c in "_-" for c in name)
    require(good, f"{what} is {name!r}, but must consist of letters, digits, _ and -")


def _column(name: str, values: Any, ids: Ids, where: str) -> TableColumn:
    at = f"{where}: columns.{name}"
    require(isinstance(values, dict), f'{at} is {values!r}, but must be like {{use = "categorical"}}')
    use = values.get("use")
    uses: tuple[Any, ...] = tuple(use) if isinstance(use, list) and use else (use,)
    for u in uses:
        one_of(f"{at}.use", u, tuple(USES))
    clash = len(set(uses)) < len(uses) or ("ignore" in uses and len(uses) > 1) or any(a <= set(uses) for a in _APART)
    require(not clash, f"{at}.use is {use}, but these uses exclude each other")
    _known(values, ("use", *dict.fromkeys(s for u in uses for s in USES[u])), where, f"columns.{name}.")
    rest = {k: v for k, v in values.items() if k not in ("use", "vocabulary", "min_count", "max_rows")}
    of_ids = {k: v for k, v in values.items() if k in ("vocabulary", "min_count", "max_rows")}
    column = _filled(TableColumn(name, uses), rest, where, f"columns.{name}.")
    ids = _filled(ids, of_ids, where, f"columns.{name}.")
    _check_ids(ids, at)
    one_of(f"{at}.transform", column.transform, TRANSFORMS)
    one_of(f"{at}.combiner", column.combiner, COMBINERS)
    for setting, least in (("history", 0), ("max_length", 1)):
        value = getattr(column, setting)
        require(
            least <= value <= LONGEST, f"{at}.{setting} is {value}, but must be at least {least} and at most {LONGEST}"
        )
    require(column.hex_digits >= 0, f"{at}.hex_digits is {column.hex_digits}, but must be at least 0")
    require(bool(column.separator), f"{at}.separator is empty")
    other = [d for d in ("%G", "%V", "%u", "%U", "%W", "%Z") if d in column.format]
    require(not other, f"{at}.format is {column.format!r}, but {(other or [''])[0]} does not say which time it is")
    require(
        column.format in TIMES or "%" in column.format,
        f"{at}.format is {column.format!r}, but must be {', '.join(TIMES)}, or as of strptime, such as %Y-%m-%d",
    )
    require(column.at_least is None or column.positive is None, f"{at}: only one of at_least and positive may be given")
    return dataclasses.replace(column, table=column.table or name, ids=ids)


def _check_ids(ids: Ids, at: str) -> None:
    one_of(f"{at}.vocabulary", ids.vocabulary, VOCABULARIES)
    require(ids.min_count >= 1, f"{at}.min_count is {ids.min_count}, but must be at least 1")
    require(2 <= ids.max_rows < 2**31, f"{at}.max_rows is {ids.max_rows}, but must be at least 2 and below 2^31")


def _known(values: Mapping[str, Any], known: tuple[str, ...], where: str, prefix: str) -> None:
    for key in values:
        require(key in known, f"{where}: {prefix}{key} is not known; there are: {', '.join(known)}")


def _typed(values: Mapping[str, Any], key: str, kind: type, where: str, default: Any, prefix: str = "") -> Any:
    value = values.get(key, default)
    names = {dict: "a table", str: "text", bool: "true or false", int: "a whole number"}
    good = isinstance(value, kind) and isinstance(value, bool) <= (kind is bool)  # Python's bool is an int.
    require(good, f"{where}: {prefix}{key} is {value!r}, but must be {names[kind]}")
    return value


def _texts(values: Mapping[str, Any], key: str, where: str) -> list[str]:
    names = values[key]
    good = isinstance(names, list) and len(names) > 0 and all(isinstance(n, str) and n for n in names)
    require(good and len(set(names)) == len(names), f"{where}: files.{key} must be a list of different names")
    return names


def _filled(defaults: Any, values: Mapping[str, Any], where: str, prefix: str) -> Any:
    """Returns the dataclass with fields replaced by values of the right types."""
    kinds = {"str": str, "int": int, "float": float, "float | None": float, "str | None": str}
    what = {str: "text", int: "a whole number", float: "a number"}
    fields = {f.name: f.type for f in dataclasses.fields(defaults) if f.type in kinds and f.name != "name"}
    _known(values, tuple(fields), where, prefix)
    changes = {}
    for key, value in values.items():
        kind = kinds[str(fields[key])]
        good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        # No setting is a number that large, and not every such integer is a float.
        if not good or (kind is not str and not abs(value) < 2**63):
            raise UserError(f"{where}: {prefix}{key} is {str(value)[:40]!r}, but must be {what[kind]}")
        changes[key] = kind(value)
    return dataclasses.replace(defaults, **changes)
