"""Tables prepared end to end are as those prepared row by row in plain Python, however they are cut and read."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path

import numpy as np
import plain_preparation
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrec.checks import UserError
from jaxrec.data import blocks
from jaxrec.data.datasets import tabular
from jaxrec.data.datasets.tabular import TabularData
from jaxrec.data.pipeline import Batches
from jaxrec.data.tabular import encode, files, schema, text_rows, vocabulary
from jaxrec.data.tabular.text_tables import BadRows

SCHEMA = {
    "name": "shop",
    "files": {"train": "train.csv", "validation": "validation.csv", "test": "test.csv"},
    "split": {"by": "time", "validation": 0.2, "test": 0.1, "seed": 5},
    "ids": {"min_count": 2, "max_rows": 20},
    "columns": {
        "click": {"use": "label"},
        "stars": {"use": "label", "at_least": 4},
        "reply": {"use": "auxiliary", "positive": "yes"},
        "share": {"use": "weight"},
        "price": {"use": "dense"},
        "age": {"use": "dense", "transform": "standard"},
        "score": {"use": "dense", "transform": "none"},
        # Named as columns of a block are, which they must not replace.
        "position": {"use": "categorical", "history": 3, "table": "place"},
        "next": {"use": "categorical", "table": "place"},
        "group": {"use": "categorical", "vocabulary": "hash", "max_rows": 13, "history": 2},
        "tags": {"use": "bag", "max_length": 2, "min_count": 3},
        "who": {"use": ["user", "categorical"], "max_rows": 1000, "min_count": 1},
        "at": {"use": "time"},
        "part": {"use": "split"},
    },
}


def schema_by(rule: str, **changes) -> schema.TableSchema:
    return schema.parse({**SCHEMA, "split": {**SCHEMA["split"], "by": rule}, **changes}, "shop.toml")


def make_rows(n: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        missing = draw.random() < 0.2
        rows.append({
            "click": str(draw.randrange(2)), "stars": draw.choice(("1", "3.5", "4", "5.0")),
            "reply": draw.choice(("yes", "no", "")), "share": draw.choice(("1", "0", "2.5", "1e-3")),
            "price": "" if missing else f"{draw.gauss(0, 100):.3f}", "age": "" if missing else str(draw.randrange(80)),
            "score": draw.choice(("", " ", "-7", "1e3", ".5")), "position": f"p{int(draw.expovariate(0.15))}",
            "next": f"p{int(draw.expovariate(0.3))}", "group": draw.choice(("", "a, b", 'say "so"', "\u00e9", f"g{i}")),
            "tags": "|".join(draw.choices(("x", "y", "zz", f"t{draw.randrange(40)}", ""), k=draw.randrange(5))),
            "who": draw.choice(("", *(f"user {draw.randrange(25)}" for _ in range(3)))), "at": str(draw.randrange(200)),
            "part": draw.choice(("train", "train", "validation", "test")),
        })  # fmt: skip
    return rows


def text_of(rows: list[dict[str, str]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def write_tables(folder: Path, of_files: list[list[dict[str, str]]], form: str = "csv") -> Path:
    """Writes a folder of files, named as the splits are."""
    folder.mkdir()
    for rows, name in zip(of_files, ("train", "validation", "test"), strict=False):
        if form == "parquet":
            table = pa.table({k: [row[k] for row in rows] for k in rows[0]})
            # What parquet has types for: whole numbers, reals with missing ones, lists, categories.
            at = table.schema.names.index
            lists = pa.large_list(pa.string())
            typed = {
                "click": pa.array([row["click"] == "1" for row in rows]),
                "at": pa.array([int(row["at"]) for row in rows]),
                "age": pa.array([None if not row["age"] else float(row["age"]) for row in rows]),
                "price": pa.array([float(row["price"] or "nan") for row in rows], pa.float64()),
                "tags": pa.array([row["tags"].split("|") if row["tags"] else None for row in rows], lists),
                "who": table["who"].combine_chunks().dictionary_encode(),
                "group": table["group"].cast(pa.large_string()),
            }  # fmt: skip
            for column, values in typed.items():
                table = table.set_column(at(column), column, values)
            parquet.write_table(table, folder / f"{name}.parquet", row_group_size=77)
        elif form == "csv.gz":
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress(text_of(rows)))
        else:
            (folder / f"{name}.csv").write_bytes(text_of(rows))
    return folder


def prepare(source: Path, of: schema.TableSchema, data_dir: Path, threads: int = 2, allowed: int = 0):
    """Returns the folder, and the malformed rows."""
    bad = BadRows(allowed)
    folder, rows_in, rows_out = tabular.write(files.find(source, of), of, str(data_dir), "a test", bad, threads=threads)
    assert rows_in == rows_out + bad.count
    assert not list(data_dir.glob(".*.parts")) and not list(data_dir.glob(".*.tmp-*"))
    return folder, bad


def assert_prepared(folder: Path, wanted: plain_preparation.Prepared, of: schema.TableSchema) -> None:
    found = blocks.read(folder)
    assert dict(found.facts.vocabulary) == wanted.tables
    assert {k: dict(v) for k, v in found.facts.unseen.items()} == wanted.unseen
    for name, rows in wanted.splits.items():
        split = found.splits[name]
        read = [split[i] for i in range(len(split))]
        columns = {c: np.concatenate([block[c] for block in read]) for c in read[0]}
        assert split.rows == len(rows)
        for c in {"labels", "weight", "timestamp", "group", "position"} & set(columns):
            np.testing.assert_array_equal(columns[c], np.array([row[c] for row in rows], columns[c].dtype), c)
        assert ("dense" in columns) == bool(of.of("dense"))
        if of.of("dense"):
            wanted_dense = [row["dense"] for row in rows]
            np.testing.assert_allclose(columns["dense"], wanted_dense, rtol=2e-6, atol=2e-6)
        for c in of.of("categorical", "bag"):
            ids = [row[f"{c.name}/ids"] for row in rows]
            if "bag" in c.use:
                assert columns[f"{c.name}/ids/lengths"].tolist() == [len(i) for i in ids]
                ids = [i for row in ids for i in row]
            assert columns[f"{c.name}/ids"].tolist() == ids, c.name
        uses = {"weight": "weight", "time": "timestamp", "user": "group"}
        assert {c for use, c in uses.items() if of.of(use)} == set(uses.values()) & set(columns)
    timelines = found.timelines
    if timelines is None:
        assert not any(c.history for c in of.columns)
        return
    for group in range(timelines.owners):
        mine = slice(timelines.offsets[group], timelines.offsets[group + 1])
        events = wanted.events.get(group, [])
        assert timelines.columns["timestamp"][mine].tolist() == [time for time, _ in events]
        for c in ("position", "group"):
            assert timelines.columns[f"{c}/ids"][mine].tolist() == [ids[c] for _, ids in events]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces, batches and blocks of a few rows, and counts that do not fit in memory."""
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 3000)
    monkeypatch.setattr(files, "PARQUET_ROWS", 31)
    monkeypatch.setattr(encode, "BLOCK_ROWS", 64)
    monkeypatch.setattr(encode, "COUNTED_IN_MEMORY", 40)


@pytest.mark.parametrize("rule", schema.RULES)
def test_every_split_is_as_in_plain_python(rule, tmp_path):
    rows = make_rows(500)
    of_files = [rows[:200], rows[200:330], rows[330:]] if rule in ("files", "last_file") else [rows]
    source = write_tables(tmp_path / "table", of_files)
    of = schema_by(rule)
    folder, _ = prepare(source, of, tmp_path / "data")
    # The files of a folder are in the order of their names.
    order = [0, 1, 2] if rule == "files" else [2, 0, 1]
    numbers = [i for i, j in enumerate(order) if j < len(of_files) for _ in of_files[j]]
    given = [row for j in order if j < len(of_files) for row in of_files[j]]
    wanted = plain_preparation.prepare(given, numbers, of)
    assert min(map(len, wanted.splits.values())) > 20 and not wanted.bad
    assert_prepared(folder, wanted, of)


@pytest.fixture(scope="module")
def rows():
    return make_rows(400, seed=1)


def digests(folder: Path) -> dict:
    """What must not depend on how a table was read."""
    manifest = json.loads((folder / "manifest.json").read_text())
    splits = {**manifest["splits"], "events": manifest["timelines"]["events"]}
    kept = {name: (entry["rows"], entry["sha256"]) for name, entry in splits.items()}
    return {**kept, "facts": {k: v for k, v in manifest["facts"].items() if k != "source"}}


@pytest.fixture(scope="module")
def plain_digests(rows, tmp_path_factory):
    """Of the table in one piece, read by one thread, with blocks of the tests' size."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "BLOCK_ROWS", 64)
        return digests(prepare(write_tables(folder / "t", [rows]), schema_by("time"), folder / "data", threads=1)[0])


@pytest.mark.parametrize(
    ("form", "threads", "piece"),
    [("csv", 1, 700), ("csv", 5, 700), ("csv", 2, 5000), ("csv.gz", 3, 1000), ("parquet", 1, 0), ("parquet", 4, 0)],
)
def test_threads_pieces_and_formats_change_nothing(form, threads, piece, rows, plain_digests, tmp_path, monkeypatch):
    if piece:
        monkeypatch.setattr(text_rows, "PIECE_BYTES", piece)
    folder, _ = prepare(write_tables(tmp_path / "t", [rows], form), schema_by("time"), tmp_path / "data", threads)
    assert digests(folder) == plain_digests


def test_malformed_rows_are_left_out_and_counted(rows, tmp_path):
    """The rest is prepared as if they had never been there."""
    damage = [("click", "2"), ("stars", "five"), ("share", "-1"), ("share", "1e39"), ("price", "nan"), ("price", "inf"),
              ("score", "-1e39"), ("at", "1.5"), ("at", ""), ("click", ""), ("age", "1_0")]  # fmt: skip
    damaged = [dict(row) for row in rows]
    for i, (column, text) in enumerate(damage):
        damaged[7 + 31 * i][column] = text
    of = schema_by("random")
    source = write_tables(tmp_path / "t", [damaged])
    wanted = plain_preparation.prepare(damaged, [0] * len(damaged), of)
    assert wanted.bad == [7 + 31 * i for i in range(len(damage))]
    folder, bad = prepare(source, of, tmp_path / "data", allowed=len(damage))
    assert bad.count == len(damage)
    for i, said in enumerate(bad.first):
        # No row of these holds a line end, and the header is line 1.
        assert f"train.csv, line {wanted.bad[i] + 2}: {damage[i][0]} is " in said
    assert_prepared(folder, wanted, of)
    with pytest.raises(UserError, match=rf"line \d+: age is '1_0'.* --max_bad_rows allows {len(damage) - 1} malformed"):
        prepare(source, of, tmp_path / "other", allowed=len(damage) - 1)


def test_nothing_of_the_held_out_rows_is_learned(rows, tmp_path):
    """Whatever a held-out row says, the training split and the tables' rows are the same."""
    found = []
    for other in (False, True):
        changed = [dict(row) for row in rows]
        if other:
            for row in changed:
                if row["part"] != "train":
                    row |= {"click": "0", "position": "p99", "group": "new", "tags": "new", "age": "1000", "stars": "1"}
        data_dir = tmp_path / str(other)
        folder, _ = prepare(write_tables(tmp_path / f"t{other}", [changed]), schema_by("column"), data_dir)
        of = digests(folder)
        facts = {k: v for k, v in of["facts"].items() if k not in ("unseen", "longest")}
        found.append((of["train"], of["events"], facts))
    assert found[0] == found[1]


def test_unseen_is_counted_by_hand(tmp_path):
    columns = {"y": {"use": "label"}, "a": {"use": "categorical"}, "b": {"use": "categorical", "vocabulary": "hash",
               "max_rows": 50}, "c": {"use": "bag"}}  # fmt: skip
    of = schema.parse(
        {"name": "few", "split": {"by": "order", "validation": 0.25, "test": 0.25}, "columns": columns}, "few.toml"
    )
    # Of a, `rare` occurs once in the training rows, so it has no row of its own; of b, a value is new or is not.
    table = [("0", "u", "k", "x|x"), ("1", "u", "k", "x"), ("0", "rare", "k", ""), ("1", "v", "m", "y|y"),
             ("0", "rare", "n", "x|z|z"), ("1", "u", "k", "y"), ("0", "v", "m", "z"), ("1", "w", "n", "")]  # fmt: skip
    (tmp_path / "few.csv").write_text("\n".join(["y,a,b,c", *(",".join(row) for row in table)]))
    folder, _ = prepare(tmp_path / "few.csv", of, tmp_path / "data")
    assert len({int(i) for i in vocabulary.hashed(vocabulary.keys_of(pa.array(["k", "m", "n"])), 50)}) == 3
    assert blocks.read(folder).facts.unseen == {
        "validation": {"a": 1, "b": 1, "c": 2},
        "test": {"a": 2, "b": 1, "c": 1},
    }


def test_a_batch_sees_only_what_was_earlier(rows, tmp_path):
    """Through the pipeline: a row's history is of training rows of its user, of a strictly earlier time."""
    prepare(write_tables(tmp_path / "t", [rows]), schema_by("random"), tmp_path / "data")
    dataset = TabularData("shop").open(str(tmp_path / "data"))
    wanted = plain_preparation.prepare(rows, [0] * len(rows), schema_by("random"))
    slots, at = {}, 0
    for f in dataset.schema.features:
        slots[f.name] = slice(at, at + f.max_length)
        at += f.max_length
    bags = [f.name for f in dataset.schema.bags]
    batch = Batches(dataset, "validation", 32, shuffle=False, seed=0)[0].batch
    for i, row in enumerate(wanted.splits["validation"][:32]):
        events = [ids for time, ids in wanted.events[row["group"]] if time < row["timestamp"]]
        for column, length in (("position", 3), ("group", 2)):
            past = [ids[column] for ids in events[::-1][:length]]
            got = batch.ids[i, slots[f"{column}_history"]].tolist()
            assert got == past + [0] * (length - len(past))
            assert batch.lengths[i, bags.index(f"{column}_history")] == len(past)
