"""Any schema and any damaged file: refused in one sentence that names it, or read as it is.

As test_fuzz_tables.py: 100,000 cases in all with JAXREC_FULL=1 (`make fuzz`).
"""

from __future__ import annotations

import gzip
import random

import plain_preparation
import pyarrow as pa
import pytest
from cover import FULL
from pyarrow import parquet

from jaxrec.checks import UserError
from jaxrec.data.tabular import files, parts, schema

# Hundreds of cases.
SCHEMAS, DAMAGED = (n * (100 if FULL else 1) for n in (1, 1))
# Lines before those of the columns, and what a column may be.
HEADS = (
    'name = "x"', "name = 5", "[files]", "[split]", "[ids]", "[column]", 'by = "order"', 'by = "user"', 'by = "column"',
    "validation = 0.3", "test = 0", "test = nan", "seed = 3", "seed = 99999999999999999999", 'delimiter = ";"',
    'delimiter = "::"', 'names = ["a", "b", "c"]', "names = []", 'encoding = "latin-1"', "quoted = false",
    "min_count = 0", "max_rows = 3", 'vocabulary = "hash"', "\x00", "[[columns]]", "x = [[[1]]]", "[[split]]",
)  # fmt: skip
COLUMNS = (
    '{use = "label"}', '{use = "dense"}', '{use = "categorical"}', '{use = "label", at_least = 1}',
    '{use = ["user", "categorical"]}', '{use = "time"}', '{use = "bag", separator = ""}', '{use = "weight"}',
    '{use = "bag", max_length = 2}', '{use = "time", format = "%"}', '{use = "time", format = "%Y"}', '{use = "split"}',
    '{use = "categorical", history = 3}', '{use = "label", positive = "x"}', '{use = ["ignore"]}', "1979-05-27", "1",
    '{use = ["dense", "dense"]}', '{use = [["dense"]]}', '{use = ["dense", "categorical"]}', "{}",
)  # fmt: skip


@pytest.mark.parametrize("hundred", range(SCHEMAS))
def test_schemas(hundred, tmp_path, monkeypatch):
    """A schema is refused in one sentence that names the file, or a table can be read by it."""
    path, table = tmp_path / "t.toml", tmp_path / "t.csv"
    read_by = 0
    for case in range(100):
        draw = random.Random(f"schemas {hundred} {case}")
        lines = draw.sample(HEADS, draw.randrange(1, 4)) if draw.random() < 0.4 else []
        columns = {"a": COLUMNS[0], "b": COLUMNS[1]} if draw.random() < 0.7 else {}
        columns[draw.choice("abc")] = draw.choice(COLUMNS)
        lines += ["[columns]", *(f"{name} = {what}" for name, what in columns.items())]
        text = "\n".join(lines)
        if draw.random() < 0.2:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice('"=[]{}\n\\x9.') + text[at + draw.randrange(2) :]
        path.write_text(text)
        fields = [(draw.choice("01"), draw.choice("1x"), draw.choice("uv|")) for _ in range(9)]
        table.write_text("a,b,c\n" + "".join(",".join(row) + "\n" for row in fields))
        try:
            of = schema.load(path)
        except UserError as e:
            assert str(path) in str(e) and "\n" not in str(e), text
            continue
        read_by += 1
        try:
            (file,) = files.find(table, of)
            with file.opened() as (names, tasks):
                if {c.name for c in of.columns} <= set(names):
                    for task in tasks:
                        part, wrong = parts.convert(task.parse(parts.types_of(of)), of)
                        assert part.rows + len(wrong) == 9, text
        except UserError as e:
            assert "t.csv" in str(e) or "columns." in str(e), text
    assert read_by > 5


@pytest.mark.parametrize("hundred", range(DAMAGED))
def test_damaged_files(hundred, tmp_path, monkeypatch):
    """A file that was cut or is something else is named, and its rows are not taken."""
    monkeypatch.setattr(files, "PARQUET_ROWS", 7)
    of = schema.parse({"columns": {"y": {"use": "label"}, "c": {"use": "categorical"}}}, "t.toml")
    for case in range(100):
        draw = random.Random(f"damaged {hundred} {case}")
        n = draw.randrange(1, 40)
        values = {"y": [draw.randrange(2) for _ in range(n)], "c": [draw.choice(("a", "b", None)) for _ in range(n)]}
        name = draw.choice(("t.parquet", "t.csv.gz"))
        path = tmp_path / name
        if name == "t.parquet":
            parquet.write_table(pa.table(values), path, row_group_size=draw.choice((5, 100)))
        else:
            lines = [f"{y},{c or ''}" for y, c in zip(*values.values(), strict=True)]
            path.write_bytes(gzip.compress("\n".join(["y,c", *lines]).encode()))
        whole = path.read_bytes()
        kind = draw.choice(("whole", "cut", "random", "longer"))
        path.write_bytes({
            "whole": whole, "cut": whole[: draw.randrange(len(whole))],
            "random": draw.randbytes(draw.randrange(1, 200)), "longer": whole + draw.randbytes(9),
        }[kind])  # fmt: skip
        rows = []
        try:
            (file,) = files.find(path, of)
            with file.opened() as (_, tasks):
                for task in tasks:
                    types = None if file.form else dict.fromkeys(values)
                    part, wrong = parts.convert(task.parse(types), of)
                    assert not wrong
                    keys = part.values["c"].keys[part.values["c"].codes].tolist()
                    rows += list(zip(part.labels[:, 0].tolist(), keys, strict=True))
        except UserError as e:
            assert kind != "whole" and name in str(e)
            continue
        assert kind == "whole", (name, kind)
        assert rows == [(y, plain_preparation.key_of(c or "")) for y, c in zip(*values.values(), strict=True)]
