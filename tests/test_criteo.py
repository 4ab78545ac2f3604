"""Criteo's rows as they are found: counts, every column by hand and by plain Python, and a model that learns them."""

import csv
import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import plain_preparation
import pytest
from real_tables import need
from test_encode import assert_prepared
from test_resume import quiet

from jaxrec import prepare
from jaxrec.checks import UserError
from jaxrec.configs import catalogue, overrides
from jaxrec.data import blocks
from jaxrec.data.datasets import criteo, tabular
from jaxrec.data.datasets.tabular import TabularData
from jaxrec.data.tabular import files, parts, text_rows
from jaxrec.data.tabular.files import find
from jaxrec.data.tabular.text_tables import BadRows
from jaxrec.training.loop import train

pytestmark = pytest.mark.usefixtures("compile_cache")

# Read by eye in train.tsv: of each column, a line and what stands there.
BY_HAND = {
    "label": (13, "0"), "I1": (101, "6"), "I2": (102, "0"), "I3": (103, ""), "I4": (104, "3"), "I5": (105, "19049"),
    "I6": (106, "2794"), "I7": (107, "1"), "I8": (108, "27"), "I9": (109, ""), "I10": (110, "1"), "I11": (111, "1"),
    "I12": (112, "0"), "I13": (113, "50"), "C1": (3, "287e684f"), "C2": (6, "ad4527a2"), "C3": (9, ""),
    "C4": (12, "5dbf0cc5"), "C5": (15, "4cf72387"), "C6": (18, "7e0ccccf"), "C7": (21, "38850d41"),
    "C8": (24, "1f89b562"), "C9": (27, "a73ee510"), "C10": (30, "0e9ead52"), "C11": (33, "ad2bc6f4"),
    "C12": (36, "6766a7f0"), "C13": (39, "ee79db7b"), "C14": (42, "b28479f6"), "C15": (45, "f5bfabbd"),
    "C16": (48, "81371cbc"), "C17": (51, "e5ba7672"), "C18": (54, "0f2f9850"), "C19": (57, ""), "C20": (60, "5840adea"),
    "C21": (63, "2eb5be02"), "C22": (66, "ad3062eb"), "C23": (69, "32c7478e"), "C24": (72, "3fdb382b"), "C25": (75, ""),
    "C26": (78, "402185f3"),
}  # fmt: skip


def write(path: Path, data_dir: Path, **ids) -> tuple[Path, int]:
    """Prepares a file as `jaxrec.prepare --dataset=criteo` does; returns the folder and the rows of the file."""
    of = criteo.schema(path, **ids)
    folder, rows_in, rows_out = tabular.write(files.find(path, of), of, str(data_dir), "a test", BadRows(), threads=2)
    assert rows_in == rows_out
    return folder, rows_in


def column(split: blocks.FileBlocks, name: str) -> np.ndarray:
    return np.concatenate([split[i][name] for i in range(len(split))])


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    """(rows of train.tsv, the folder that they are prepared in, in pieces of 50 kB, every value having a row)."""
    path = need("criteo-8k", "train.tsv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_rows, "PIECE_BYTES", 50_000)
        folder, rows = write(path, tmp_path_factory.mktemp("kaggle"), min_count=1)
    assert rows == 7200
    return [dict(zip(criteo.COLUMNS, line.split("\t"), strict=True)) for line in path.read_text().splitlines()], folder


def test_every_column_by_hand(kaggle):
    rows, folder = kaggle
    prepared = blocks.read(folder)
    # The last seventh is held out, its first half for validation.
    assert {name: split.rows for name, split in prepared.splits.items()} == {
        "train": 7200 - round(7200 / 7), "validation": round(7200 / 7) - round(7200 / 14), "test": round(7200 / 14)
    }  # fmt: skip
    train = prepared.splits["train"]
    dense = column(train, "dense")
    for name, (line, text) in BY_HAND.items():
        if name == "label":
            assert column(train, "labels")[line - 1, 0] == float(text)
        elif name in criteo.COUNTS:
            found = dense[line - 1, criteo.COUNTS.index(name)]
            assert found == pytest.approx(math.log(1 + float(text or 0)), rel=1e-6), name
        else:
            # The id is the place of the text among those of the training rows, the most frequent first.
            same = [row[name] == text for row in rows[: train.rows]]
            more_frequent = column(train, f"{name}/ids")[line - 1] - 1
            counts = np.unique([row[name] for row in rows[: train.rows]], return_counts=True)[1]
            assert (counts > sum(same)).sum() <= more_frequent < (counts >= sum(same)).sum(), name
            np.testing.assert_array_equal(column(train, f"{name}/ids") == more_frequent + 1, same, name)


def test_every_row_by_plain_python(kaggle, tmp_path):
    rows, folder = kaggle
    of = criteo.schema(need("criteo-8k", "train.tsv"), min_count=1)
    assert_prepared(folder, plain_preparation.prepare(rows, [0] * len(rows), of), of)
    usual, _ = write(need("criteo-8k", "train.tsv"), tmp_path)
    of = criteo.schema(need("criteo-8k", "train.tsv"))
    assert of.columns[-1].ids.min_count == 10
    assert_prepared(usual, plain_preparation.prepare(rows, [0] * len(rows), of), of)


# Counts of the first columns of a row, read by eye, and on which line of the file it stands.
@pytest.mark.parametrize(
    ("name", "rows", "line", "counts"),
    [
        # A header, an Id column, CRLF.
        ("kaggle2014_train.tiny.csv", 1999, 101, [0, 48, 3, 2]),
        # A header, counts as decimals, one of them -1, others missing.
        ("deepctr_criteo_sample.txt", 200, 3, [None, -1, 19, 35]),
    ],
)
def test_other_forms(name, rows, line, counts, tmp_path):
    path = need("criteo-8k", name)
    folder, found = write(path, tmp_path, min_count=1)
    assert found == rows
    with path.open(newline="") as file:
        given = [{k.lower(): v for k, v in row.items()} for row in csv.DictReader(file)]
    of = criteo.schema(path, min_count=1)
    plain = [{c.name: row[c.name.lower()] for c in of.columns} for row in given]
    assert_prepared(folder, plain_preparation.prepare(plain, [0] * rows, of), of)
    dense = column(blocks.read(folder).splits["train"], "dense")[line - 2, :4]
    np.testing.assert_allclose(dense, [math.copysign(math.log1p(abs(x or 0)), x or 0) for x in counts], rtol=1e-6)


def test_rows_that_lost_their_last_tabs_are_read(tmp_path):
    """The last values of nearly half of the rows of this copy are missing, and so are the tabs before them."""
    path = need("criteo-8k", "kaggle_head_1000.tsv")
    of, bad = criteo.schema(path, min_count=1), BadRows()
    folder, rows_in, rows_out = tabular.write(files.find(path, of), of, str(tmp_path), "a test", bad, threads=2)
    assert (rows_in, rows_out, bad.count, bad.padded) == (1000, 1000, 0, 498)
    # Its last line has no end.
    lines = [line.split("\t") for line in path.read_text().split("\n")]
    rows = [dict(zip(criteo.COLUMNS, [*fields, *[""] * (40 - len(fields))], strict=True)) for fields in lines]
    assert_prepared(folder, plain_preparation.prepare(rows, [0] * 1000, of), of)


def test_splits_of_several_files_are_days(tmp_path):
    """The last file is held out. The terabyte's files have no suffix, and a readme beside them."""
    source = tmp_path / "days"
    source.mkdir()
    for day, part in ((2, "train"), (9, "dev"), (10, "test")):
        shutil.copy(need("criteo-8k", f"{part}.tsv"), source / f"day_{day}")
    (source / "readme.txt").write_text("Criteo's terabyte")
    folder, rows = write(criteo.find(source), tmp_path)
    assert rows == 8000
    counts = {name: split.rows for name, split in blocks.read(folder).splits.items()}
    assert counts == {"train": 7200 + 409, "validation": 391 // 2, "test": 391 - 391 // 2}


def test_the_command(call, tmp_path):
    flags = [f"--input={need('criteo-8k', 'dev.tsv')}", f"--data_dir={tmp_path}", "--min_count=2"]
    status, out, err = call(prepare, "--dataset=criteo", *flags)
    assert status == 0, err
    said = json.loads(out.splitlines()[-1])
    assert (said["dataset"], said["rows_in"], said["rows_out"], said["bad_rows"]) == ("criteo-1.0.0", 409, 409, 0)
    rows = [dict(zip(criteo.COLUMNS, line.split("\t"), strict=True))
            for line in need("criteo-8k", "dev.tsv").read_text().splitlines()]  # fmt: skip
    of = criteo.schema(need("criteo-8k", "dev.tsv"), min_count=2)
    assert_prepared(tmp_path / "criteo-1.0.0", plain_preparation.prepare(rows, [0] * len(rows), of), of)


def test_a_thousand_rows_are_learned_by_heart(tmp_path, monkeypatch):
    with need("criteo-8k", "train.tsv").open() as file:
        (tmp_path / "train.txt").write_text("".join(itertools.islice(file, 1167)))
    write(criteo.find(tmp_path), tmp_path, min_count=1)
    opened = TabularData.open

    def on_training_rows(self, data_dir):
        dataset = opened(self, data_dir)
        return dataclasses.replace(dataset, splits={**dataset.splits, "validation": dataset.splits["train"]})

    monkeypatch.setattr(TabularData, "open", on_training_rows)
    config = overrides.apply(
        catalogue.get("dlrm_criteo"),
        ["model.bottom_mlp=32,16", "model.top_mlp=32", "training.steps=100", "training.batch_size=250",
         "training.eval_every=0", "training.checkpoint_every=0", "schedule.name=constant", "schedule.warmup_steps=0"],
    )  # fmt: skip
    summary, status = train(config, dataclasses.replace(quiet(tmp_path / "run"), data_dir=str(tmp_path)))
    assert status == 0 and summary["metrics"]["validation"]["rows"] == 1000
    assert summary["metrics"]["validation"]["auc"] > 0.99
    assert summary["metrics"]["test"]["auc"] < 0.95, "what was not trained on is not known"


def test_rows_without_their_trailing_tabs_are_whole(tmp_path):
    """An editor that cuts off trailing tabs changes nothing but the count of rows that it did so to."""
    rows = [["1", *["2"] * 13, *[f"{i:08x}" for i in range(26 - lost)], *[""] * lost] for lost in (0, 0, 1, 3, 26)] * 4
    whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
    for i, row in enumerate(rows):
        row[0] = str(i % 2)
    whole.write_text("".join("\t".join(row) + "\n" for row in rows))
    cut.write_text("\n".join("\t".join(row).rstrip("\t") for row in rows))
    parts_of = []
    for path in (whole, cut):
        schema = criteo.schema(path)
        (file,) = find(path, schema)
        bad = BadRows()
        folder = tmp_path / path.stem
        folder.mkdir()
        made, rows_in = parts.make([file], dataclasses.replace(schema, name="c"), folder, bad, threads=1)
        assert rows_in == len(rows) and bad.count == 0
        assert bad.padded == (12 if path is cut else 0)
        parts_of.append(parts.load(made[0]))
    a, b = parts_of
    np.testing.assert_array_equal(a.labels, b.labels)
    np.testing.assert_array_equal(a.dense, b.dense)
    for name, values in a.values.items():
        np.testing.assert_array_equal(values.keys[values.codes], b.values[name].keys[b.values[name].codes])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0000000a", "0000000g", "C11 is '0000000g', but must be 8 hexadecimal digits"),
        ("0000000a", "a", "C11 is 'a', but must be 8 hexadecimal digits"),
        ("\t2\t00000000", "\t2.x\t00000000", "I13 is '2.x', but must be a number"),
        ("\t00000019", "\t00000019\t", "it has 41 fields, but must have 14 to 40"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, old, new, says):
    row = "\t".join(["1", *["2"] * 13, *[f"{i:08x}" for i in range(26)]])
    path = tmp_path / "train.txt"
    path.write_text(f"{row}\n{row.replace(old, new)}\n{row}\n")
    schema = criteo.schema(path)
    (file,) = find(path, schema)
    with pytest.raises(UserError, match=re.escape(f"train.txt, line 2: {says}; --max_bad_rows allows 0")):
        parts.make([file], schema, tmp_path, BadRows(), threads=1)


def test_a_row_that_ends_within_its_counts_is_malformed(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text("1\t2\t3\n" * 3)
    schema = criteo.schema(path)
    with pytest.raises(UserError, match="line 1: it has 3 fields, but must have 14 to 40"):
        parts.make(find(path, schema), schema, tmp_path, BadRows(), threads=1)
