"""Looking at a table: what is known of its columns, what is proposed, and that the proposal is a schema."""

import random
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrec.checks import UserError
from jaxrec.data.datasets import criteo
from jaxrec.data.tabular import files, propose, schema, text_rows
from jaxrec.data.tabular.propose import Seen, look, suggest


def seen_of(folder, columns: dict[str, list]) -> dict[str, Seen]:
    path = folder / "t.csv"
    names = list(columns)
    path.write_text("\n".join([",".join(names), *(",".join(row) for row in zip(*columns.values(), strict=True))]))
    return look(files.find(path), threads=2)[0]


def test_what_is_known_of_a_column(tmp_path, monkeypatch):
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 50)
    columns = {
        "n": ["1", "-2", "", "1", "1e3", "x"] * 10,
        "d": ["2024-01-05", "2024-01-05T10:00", "", "a|b", "|", "b"] * 10,
    }
    seen = seen_of(tmp_path, columns)
    n, d = seen["n"], seen["d"]
    assert (n.rows, n.missing, n.numbers, n.whole, n.low, n.high, n.distinct) == (60, 10, 40, 30, -2, 1000, 5)
    assert (d.dates, d.lists, d.distinct) == (20, 10, 6) and len(d.examples) == 3


def test_distinct_values_are_estimated_where_they_are_many():
    draw = np.random.default_rng(0)
    seen = Seen()
    for _ in range(40):
        keys = np.unique(draw.integers(0, 2**64, 5000, dtype=np.uint64))
        seen.add(Seen(sketch=keys[: propose.SKETCH + 1]))
    assert not seen.is_exact and seen.distinct == pytest.approx(200_000, rel=0.03)
    few = Seen(sketch=np.arange(7, dtype=np.uint64))
    assert few.is_exact and few.distinct == 7


@pytest.mark.parametrize(
    ("name", "values", "proposal"),
    [
        ("click", ["0", "1"], '{use = "label"}'),
        ("Rating", ["1", "5", "3"], '{use = "label", at_least = 4}'),
        ("click", ["yes", "no"], '{use = "categorical"}'),
        ("flag", ["7"], '{use = "ignore"}'),
        ("user_id", [str(i) for i in range(90)], '{use = ["user", "categorical"]}'),
        ("timestamp", [str(i) for i in range(90)], '{use = "time"}'),
        ("day", ["2024-01-05", "2024-01-06"], '{use = "time", format = "iso"}'),
        ("tags", ["a|b", "c"], '{use = "bag", separator = "|"}'),
        ("price", ["1.5", "2"], '{use = "dense"}'),
        ("item_id", [str(i) for i in range(90)], '{use = "categorical"}'),
        ("size", [str(i) for i in range(90)], '{use = "dense"}'),
        ("c3", [str(i) for i in range(90)], '{use = "categorical"}'),
        ("comment", [f"text {i}" for i in range(3000)], '{use = "ignore"}'),
        ("color", ["red", "blue"], '{use = "categorical"}'),
    ],
)
def test_suggestions(name, values, proposal, tmp_path):
    seen = seen_of(
        tmp_path,
        {name: values * max(1, 300 // len(values)), "other": ["1"] * (len(values) * max(1, 300 // len(values)))},
    )
    assert suggest(name, seen[name], schema.Ids()).split("  #")[0] == proposal


def test_any_name_and_value_makes_a_schema(tmp_path):
    """Whatever a column is named and holds, what is proposed can be loaded."""
    draw = random.Random(0)
    odd = [
        'a "b"',
        "c\\d",
        "\u00e9\u4e2d",
        "\U0001f600",
        "\U000e0001",
        "e\tf",
        "\u200b",
        "\x07",
        "x=y # z",
        "[g]",
        "'",
        "1.5",
        "",
    ]
    for case in range(60):
        names = draw.sample(odd, 5)
        table = pa.table(
            {name: [draw.choice([*odd, "1", "2.5", "1e999", "-", "a|b"]) for _ in range(30)] for name in names}
        )
        parquet.write_table(table, tmp_path / "t.parquet")
        to = tmp_path / f"{case}.toml"
        propose.propose(tmp_path / "t.parquet", to, threads=1)
        text = to.read_text() + 'label = {use = "label"}\nprice = {use = "dense"}\n'
        to.write_text(text)
        assert {c.name for c in schema.load(to).columns} == {*names, "label", "price"}


def test_types_of_parquet(tmp_path, capsys):
    table = pa.table({
        "click": [True, False], "at": pa.array([1, 2], pa.timestamp("us")), "tags": [["a"],
                                               ["b", "c"]], "none": pa.nulls(2),
        "empty": pa.array([[], []], pa.list_(pa.string())), "x": [1.5, None],
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "t.parquet")
    propose.propose(tmp_path / "t.parquet", tmp_path / "t.toml", threads=1)
    assert "2 rows, in 1 file(s)" in capsys.readouterr().out
    uses = dict(re.findall(r'^(\w+) = \{use = "(\w+)"', (tmp_path / "t.toml").read_text(), re.MULTILINE))
    assert (
        uses["click"] == "label"
        and uses["tags"] == "bag"
        and uses["at"] == "time"
        and uses["x"] == "dense"
        and uses["none"] == "ignore"
    )


def test_a_table_without_rows_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n")
    with pytest.raises(UserError, match="has no rows"):
        propose.propose(tmp_path / "t.csv", tmp_path / "t.toml", threads=1)
    (tmp_path / "t.csv").write_text("a,b\n1\n2,3,4\n")
    with pytest.raises(UserError, match="has no rows"):
        propose.propose(tmp_path / "t.csv", tmp_path / "t.toml", threads=1)
    assert not (tmp_path / "t.toml").exists()


def test_criteo_is_proposed_with_its_form(tmp_path):
    rows = [
        "\t".join([str(i % 2), *(str(i + j) for j in range(13)), *(f"{i * j % 97:08x}" for j in range(26))])
        for i in range(300)
    ]
    (tmp_path / "train.txt").write_text("\n".join(rows))
    known = criteo.schema(tmp_path / "train.txt")
    propose.propose(tmp_path / "train.txt", tmp_path / "c.toml", threads=1, known=known)
    of = schema.load(tmp_path / "c.toml")
    assert (of.names, of.delimiter, of.quoted, of.split.by) == (criteo.COLUMNS, "\t", False, "order")
    assert {c.name: c.use[0] for c in of.columns} == {
        "label": "label", **dict.fromkeys(criteo.COUNTS, "dense"), **dict.fromkeys(criteo.CATEGORIES, "categorical"),
        "C1": "ignore",
    }  # fmt: skip
