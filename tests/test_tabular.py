"""A table of one's own, from the proposal of its schema to training; Avazu's rows are the example."""

import csv
import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import plain_preparation
import pytest
from real_tables import need
from test_encode import assert_prepared
from test_resume import quiet
from test_wrong_inputs import assert_one_sentence

from jaxrec import evaluate, prepare
from jaxrec.checks import UserError
from jaxrec.configs import catalogue, overrides
from jaxrec.data import blocks
from jaxrec.data.datasets import synthetic
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.datasets.tabular import TabularData
from jaxrec.data.tabular import schema
from jaxrec.training.loop import train

pytestmark = pytest.mark.usefixtures("compile_cache")

NAMES = [
    "id", "click", "hour", "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type", "C14", "C15", "C16",
    "C17", "C18", "C19", "C20", "C21",
]  # fmt: skip
CATEGORIES = [name for name in NAMES if name not in ("id", "click", "hour", "device_ip")]
AVAZU = f"""
name = "avazu"
[files]
names = [{", ".join(f'"{name}"' for name in NAMES)}]
train = "train.csv"
validation = "dev.csv"
test = "test.csv"
[split]
by = "files"
[ids]
min_count = 3
[columns]
click = {{use = "label"}}
hour = {{use = "time", format = "%y%m%d%H"}}
device_ip = {{use = "categorical", vocabulary = "hash", max_rows = 500}}
{chr(10).join(f'{name} = {{use = "categorical"}}' for name in CATEGORIES)}
"""
# Read by eye in train.csv: of each column, a line and what stands there.
BY_HAND = {
    "click": (14, "0"), "hour": (21, "14102100"), "C1": (28, "1005"), "banner_pos": (35, "0"),
    "site_id": (42, "1fbe01fe"), "site_domain": (49, "f3845767"), "site_category": (56, "28905ebd"),
    "app_id": (63, "ecad2386"), "app_domain": (70, "2347f47a"), "app_category": (77, "07d7df22"),
    "device_id": (84, "a99f214a"), "device_ip": (91, "4375586d"), "device_model": (98, "158e4944"),
    "device_type": (105, "1"), "device_conn_type": (112, "0"), "C14": (119, "15705"), "C15": (126, "320"),
    "C16": (133, "50"), "C17": (140, "2161"), "C18": (147, "0"), "C19": (154, "35"), "C20": (161, "100079"),
    "C21": (168, "79"),
}  # fmt: skip


@pytest.fixture(scope="module")
def avazu(tmp_path_factory):
    """(schema file, folder of data sets that holds avazu)."""
    from test_encode import prepare as write

    folder = tmp_path_factory.mktemp("avazu")
    (folder / "avazu.toml").write_text(AVAZU)
    write(need("avazu-9k"), schema.load(folder / "avazu.toml"), folder / "data")
    return folder / "avazu.toml", folder / "data"


def test_avazu_by_hand_and_by_plain_python(avazu):
    path, data = avazu
    of = schema.load(path)
    rows, numbers = [], []
    for i, name in enumerate(("train", "dev", "test")):
        lines = (need("avazu-9k") / f"{name}.csv").read_text().splitlines()
        # Only the file of the training rows has a header.
        lines = lines[1:] if name == "train" else lines
        rows += [dict(zip(NAMES, fields, strict=True)) for fields in csv.reader(lines)]
        numbers += [i] * len(lines)
    # 21 October 2014, midnight, in microseconds since 1970: all rows are of that hour.
    assert {row["hour"] for row in rows} == {"14102100"}
    plain = [{**row, "hour": "1413849600000000"} for row in rows]
    assert_prepared(data / "avazu-1.0.0", plain_preparation.prepare(plain, numbers, of), of)
    prepared = blocks.read(data / "avazu-1.0.0")
    assert {name: split.rows for name, split in prepared.splits.items()} == {
        "train": 8087, "validation": 480, "test": 432
    }  # fmt: skip
    block = prepared.splits["train"][0]
    train = rows[:8087]
    for name, (line, text) in BY_HAND.items():
        if name == "click":
            assert block["labels"][line - 2, 0] == float(text)
        elif name == "hour":
            assert block["timestamp"][line - 2] == 1413849600000000
        else:
            same = np.array([row[name] == text for row in train])
            found = block[f"{name}/ids"][line - 2]
            np.testing.assert_array_equal(block[f"{name}/ids"][same], found, name)
            if name != "device_ip":
                assert found > 0 and not (block[f"{name}/ids"][~same] == found).any()


def test_avazu_trains(avazu, tmp_path):
    config = overrides.apply(
        catalogue.get("dlrm_tabular"),
        ["data.table=avazu", "model.bottom_mlp=8,16", "model.top_mlp=16", "training.steps=8", "training.eval_every=4"],
    )
    summary, status = train(config, dataclasses.replace(quiet(tmp_path / "run"), data_dir=str(avazu[1])))
    assert status == 0 and summary["steps"] == 8
    for split, rows in (("validation", 480), ("test", 432)):
        assert summary["metrics"][split]["rows"] == rows and math.isfinite(summary["metrics"][split]["ne"])


HEADER = 'liked,user_id,when,genre tags,price,age,city,"odd ""name""",constant'
TABLE = [
    f"{i % 2},u{i % 50},2024-01-{1 + i % 28:02d} 10:00:00,{'a|b' if i % 3 else 'c'},{i * 1.25},{i % 90},city {i % 20},"
    f"x{i % 3},same"
    for i in range(400)
]


def test_what_is_proposed_can_be_prepared(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my table.v2.csv").write_text("\n".join([HEADER, *TABLE]))
    status, out, err = call(prepare, "--dataset=tabular", "--input=my table.v2.csv", "--propose")
    assert status == 0, err
    assert "400 rows, in 1 file(s)" in out and "schema      my table.toml" in out
    of = schema.load(Path("my table.toml"))
    assert {c.name: c.use for c in of.columns} == {
        "liked": ("label",), "user_id": ("user", "categorical"), "when": ("time",), "genre tags": ("bag",),
        "price": ("dense",), "age": ("dense",), "city": ("categorical",), 'odd "name"': ("categorical",),
        "constant": ("ignore",),
    }  # fmt: skip
    assert of.split.by == "time" and of.name == "my_table"
    flags = ["--dataset=tabular", "--input=my table.v2.csv", "--schema=my table.toml", "--data_dir=data"]
    status, out, err = call(prepare, *flags)
    assert status == 0, err
    facts = json.loads(out.splitlines()[-1])
    assert (facts["dataset"], facts["rows_in"], facts["rows_out"]) == ("my_table-1.0.0", 400, 400)
    dataset = TabularData("my_table").open("data")
    assert dataset.schema.labels == ("liked",) and dataset.schema.dense == ("price", "age")
    assert [f.name for f in dataset.schema.features] == ["user_id", "genre tags", "city", 'odd "name"']


def test_what_is_not_prepared_is_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.table is not given; --set data\.table=NAME"):
        TabularData().open(str(tmp_path))
    with pytest.raises(UserError, match=r"data\.table is 'clicks', but --data_dir=.* python -m jaxrec\.prepare"):
        TabularData("clicks").open(str(tmp_path))


def test_synthetic_rows_on_disk_are_those_that_are_computed(call, tmp_path):
    sizes = ["train_rows=9000", "validation_rows=500", "test_rows=400", "tables=2", "rows=50", "dense=3"]
    flags = ["--dataset=synthetic", *(f"--set={s}" for s in sizes), f"--data_dir={tmp_path}", "--name=rows"]
    status, out, err = call(prepare, *flags)
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["rows_out"] == 9900
    stored = TabularData("rows").open(str(tmp_path))
    computed = overrides.apply(SyntheticData(), sizes).open()
    assert stored.schema == computed.schema
    for name, split in computed.splits.items():
        for i in range(len(split)):
            for column, values in split[i].items():
                np.testing.assert_array_equal(stored.splits[name][i][column], values)
    status, _, err = call(prepare, *flags)
    assert_one_sentence(status, err, "rows-1.0.0 exists already", "--name")


def test_a_run_does_not_go_on_with_rows_prepared_anew(call, tmp_path):
    """Another split of the same table: what is held out now was trained on before."""
    small = ["--dataset=synthetic", "--name=rows", f"--data_dir={tmp_path}", "--set=train_rows=2000", "--set=tables=2",
             "--set=validation_rows=300", "--set=test_rows=300"]  # fmt: skip
    assert call(prepare, *small)[0] == 0
    config = overrides.apply(
        catalogue.get("dlrm_tabular"),
        ["data.table=rows", "model.bottom_mlp=8", "model.top_mlp=8", "training.batch_size=100", "training.steps=3",
         "training.eval_every=0"],
    )  # fmt: skip
    options = dataclasses.replace(quiet(tmp_path / "run"), data_dir=str(tmp_path))
    assert train(config, options)[1] == 0
    assert train(overrides.apply(config, ["training.steps=4"]), options)[1] == 0
    shutil.rmtree(tmp_path / "rows-1.0.0")
    assert call(prepare, *small, "--set=seed=7")[0] == 0
    longer = overrides.apply(config, ["training.steps=6"])
    with pytest.raises(UserError, match="was trained on other rows: its data set has been prepared anew since"):
        train(longer, options)
    status, _, err = call(evaluate, f"--workdir={tmp_path / 'run'}", f"--data_dir={tmp_path}", "--compile_cache=off")
    assert_one_sentence(status, err, "was trained on other rows", "name another --workdir")
    # The same rows again are as good as the first.
    shutil.rmtree(tmp_path / "rows-1.0.0")
    assert call(prepare, *small)[0] == 0
    assert train(longer, options)[1] == 0


def test_training_says_that_it_is_evaluated_late(tmp_path, capsys):
    synthetic.write(SyntheticData(500, 300, 300, tables=2), "few", str(tmp_path))
    config = overrides.apply(
        catalogue.get("dlrm_tabular"),
        ["data.table=few", "model.bottom_mlp=8", "model.top_mlp=8", "training.batch_size=100", "training.steps=40",
         "training.eval_every=20"],
    )  # fmt: skip
    options = dataclasses.replace(quiet(tmp_path / "run"), data_dir=str(tmp_path), quiet=False)
    train(config, options)
    assert "epochs      8.0 in 40 steps, 4.0 of them before the first evaluation" in capsys.readouterr().err
