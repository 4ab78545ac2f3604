"""Criteo's click logs: the Kaggle challenge's train.txt (7 days) and the terabyte's day files (day_0 to day_23).

A row is a label, 13 counts and 26 categories of 8 hexadecimal digits, separated by tabs, without a header. Counts may
be missing or negative: they become sign(x) log(1 + |x|), a missing one 0. A category that is missing is a value as any
other. Copies whose trailing tabs an editor has cut off lack their last categories, which are often missing: such a row
has them missing, and is counted.
Comma-separated samples with a header (label, I1 to I13, C1 to C26, in any case and order) are read too.

Formats: the readme.txt of either release; ailab.criteo.com.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxrec.checks import require
from jaxrec.data.tabular import files as files_lib
from jaxrec.data.tabular import schema as schema_lib
from jaxrec.data.tabular.schema import TableSchema

NAME = "criteo"
COUNTS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = ("label", *COUNTS, *CATEGORIES)
# The Kaggle file is seven days in their order: its last seventh is the last day.
DAYS = 7


def find(path: Path) -> Path | list[Path]:
    """Returns what of a folder is to be read: train.txt (test.txt has no labels), the day files in order, or all."""
    require(path.exists(), f"--input is {str(path)!r}, which does not exist")
    if not path.is_dir():
        return path
    for name in ("train.txt", "train.txt.gz", "train.parquet"):
        if (path / name).is_file():
            return path / name
    days = {file: re.fullmatch(r"day_(\d+)(\.\w+)*", file.name) for file in path.iterdir()}
    return sorted((f for f, day in days.items() if day), key=lambda f: int((days[f] or [0, 0])[1])) or path


def schema(path: Path | list[Path], **ids: Any) -> TableSchema:
    """Returns the schema of what `find` has found; `ids` replaces settings of its vocabularies.

    The last day is for validation (its first half) and test: the last file of several, or the last seventh of one.
    """
    found = files_lib.find(path)
    first = found[0]
    names: list[str] | None = list(COLUMNS)
    columns = {name: name for name in COLUMNS}
    if first.form is None or files_lib.delimiter_of(first.path) != "\t":
        with first.opened() as (has, _):
            there = {name.lower(): name for name in has}
        missing = [name for name in COLUMNS if name.lower() not in there]
        require(
            not missing,
            f"{first.path} has no column {(missing or [''])[0]}, so it is not Criteo's: that is {len(COLUMNS)} fields "
            "separated by tabs, or columns label, I1 to I13, C1 to C26",
        )
        names, columns = None, {name: there[name.lower()] for name in COLUMNS}
    half = 0.5 / DAYS
    values: dict[str, Any] = {
        "name": NAME,
        "files": {
            "quoted": False,
            **({"names": names, "delimiter": "\t", "optional_fields": len(CATEGORIES)} if names else {}),
        },
        "split": {"by": "last_file"} if len(found) > 1 else {"by": "order", "validation": half, "test": half},
        "ids": {"vocabulary": "frequency", "min_count": 10, "max_rows": 10_000_000},
        "columns": {
            columns["label"]: {"use": "label"},
            **{columns[c]: {"use": "dense", "transform": "log"} for c in COUNTS},
            **{columns[c]: {"use": "categorical", "hex_digits": 8} for c in CATEGORIES},
        },
    }
    return schema_lib.parse(values, "criteo", **ids)
