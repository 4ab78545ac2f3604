"""Wrong or damaged rows of a prepared data set: said in a sentence that names them, and what was saved stays saved."""

import dataclasses
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from cover import FULL
from test_resume import assert_same_run, quiet, steps_of

from jaxrec.checks import UserError
from jaxrec.data import block_writer, blocks
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.datasets.synthetic import SyntheticData
from jaxrec.data.pipeline import Batches
from jaxrec.data.schema import Dataset
from jaxrec.training import loop
from jaxrec.training.loop import train

pytest.importorskip("tensorflow_datasets", reason="preparing data needs tensorflow-datasets")
pytest.importorskip("array_record", reason="preparing data needs array_record")
pytestmark = pytest.mark.usefixtures("compile_cache")

SOURCE = SyntheticData(train_rows=4000, validation_rows=256, test_rows=256, tables=3, rows=101, bag=1, dense=4)
NAME, BLOCK_ROWS = "few", 64
TRAIN_FILE = "rows/1.0.0/rows-train.array_record-00000-of-00001"


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """Rows of `SOURCE` that were prepared into a folder."""

    folder: str

    def open(self, data_dir: str) -> Dataset:
        prepared = blocks.read(Path(self.folder))
        return Dataset(prepared.facts.name, SOURCE.open("").schema, prepared.splits)


def prepare(data_dir: Path, spoil=lambda columns: None) -> Path:
    """Prepares the rows, after `spoil` has had the columns by split."""
    source = SOURCE.open("")
    # Every split is one block of the source.
    columns = {name: {k: np.array(v) for k, v in split[0].items()} for name, split in source.splits.items()}
    spoil(columns)
    schema = source.schema
    facts = blocks.Facts(NAME, "1.0.0", "a test", schema.vocabulary, schema.dense, schema.labels, block_rows=BLOCK_ROWS)
    splits = {name: block_writer.counted(ArrayBlocks(c, BLOCK_ROWS)) for name, c in columns.items()}
    folder = data_dir / f"{NAME}-1.0.0"
    block_writer.prepare(folder, facts, blocks.columns_of(columns["train"]), splits)
    return folder


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    return prepare(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "data" / sound.name))


@pytest.fixture
def of(tiny):
    """Returns `of(folder)`: the config that trains on it."""
    short = tiny("training.steps=30", "training.eval_every=10", "training.checkpoint_every=4")
    return lambda folder: dataclasses.replace(short, data=PreparedData(str(folder)))


VALUES = {
    "train": ("dense", np.nan, "dense column dense_1 holds nan, but must be finite"),
    "validation": ("dense", -np.inf, "dense column dense_1 holds -inf, but must be finite"),
    "test": ("labels", 0.5, "label click holds 0.5, but must be 0 or 1"),
}


@pytest.mark.parametrize("split", VALUES)
def test_a_wrong_value(split, of, tmp_path, refused):
    column, value, named = VALUES[split]

    def spoil(columns):
        columns[split][column].reshape(len(columns[split]["labels"]), -1)[200, -1 if column == "labels" else 1] = value

    folder = prepare(tmp_path / "data", spoil)
    said = refused(of(folder), tmp_path / "run")
    assert f"data set {NAME}, split {split}: {named}; " in said
    assert f"mend what {folder} was prepared from, and delete that folder so that it is prepared again" in said
    # What was trained before the rows were read is saved.
    assert max(steps_of(tmp_path / "run"), default=0) >= {"train": 0, "validation": 8, "test": 30}[split]


@pytest.mark.parametrize("split", VALUES)
def test_an_empty_split_is_noticed_before_anything_is_compiled(split, of, tmp_path, monkeypatch, refused):
    def spoil(columns):
        columns[split] = {k: v[:0] for k, v in columns[split].items()}

    folder = prepare(tmp_path / "data", spoil)
    monkeypatch.setattr(loop, "shard_train_step", None)
    said = refused(of(folder), tmp_path / "run")
    assert f"data set {NAME}, split {split}: it has no rows; mend what {folder} was prepared from" in said


def test_a_data_set_without_validation(of, copy, tmp_path, monkeypatch, refused):
    monkeypatch.setattr(
        PreparedData, "open", lambda self, _, true=PreparedData.open: without_validation(true(self, ""))
    )
    said = refused(of(copy), tmp_path / "run")
    assert f"data set {NAME} must have a split validation, but has train, test" in said


def without_validation(dataset: Dataset) -> Dataset:
    return dataclasses.replace(dataset, splits={k: v for k, v in dataset.splits.items() if k != "validation"})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"format": 1', '"format": 2', "is of format version 2 where this jaxrec reads 1"),
        ('"version": "1.0.0"', '"version": "0.9.0"', "is of data set few-0.9.0, not few-1.0.0"),
    ],
    ids=["format", "version"],
)
def test_a_folder_of_another(old, new, named, of, copy, tmp_path, refused):
    text = (copy / "manifest.json").read_text()
    assert text.count(old) == 1
    (copy / "manifest.json").write_text(text.replace(old, new))
    said = refused(of(copy), tmp_path / "run")
    assert f"{copy}/manifest.json {named}: delete the folder {copy} so that it is prepared again" in said


def unreadable(folder: Path) -> list[int]:
    """Blocks of the training split that are refused; the others must be those of `SOURCE`."""
    split = blocks.read(folder).splits["train"]
    expected, refused = ArrayBlocks(SOURCE.open("").splits["train"][0], BLOCK_ROWS), []
    for i in range(len(split)):
        try:
            block = split[i]
        except UserError:
            refused.append(i)
            continue
        for name, column in expected[i].items():
            np.testing.assert_array_equal(block[name], column)
    return refused


def flip(path: Path, place: int, bit: int = 1) -> bytes:
    """Changes a bit of a file; returns what it held."""
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
    return whole


def test_a_changed_bit_is_found_or_does_not_matter(copy):
    path, draw, found = copy / TRAIN_FILE, random.Random(0), 0
    size = path.stat().st_size
    for place in range(size) if FULL else draw.sample(range(size), 30):
        whole = flip(path, place, 1 << draw.randrange(8))
        try:
            found += bool(unreadable(copy))
        except UserError as e:
            assert f"delete the folder {copy}" in str(e)
            found += 1
        path.write_bytes(whole)
    assert found > 10


def test_a_block_that_is_damaged_while_a_run_trains(of, copy, tmp_path, refused):
    """It is met in the last of an epoch's windows; up to there the run has saved."""
    config, path = of(copy), copy / TRAIN_FILE
    train(config, quiet(tmp_path / "straight"))
    order = Batches(config.data.open(""), "train", 128, seed=3)._make_epoch(0).blocks.tolist()
    for place in range(path.stat().st_size // 3, path.stat().st_size, 997):
        whole = flip(path, place)
        damaged = unreadable(copy)
        if damaged and order.index(damaged[0]) >= 48:
            break
        path.write_bytes(whole)
    said = refused(config, tmp_path / "run")
    assert f"{path} is damaged: record {damaged[0]} cannot be read: delete the folder {copy} so that" in said
    saved = max(steps_of(tmp_path / "run"))
    assert 20 <= saved < 30
    path.write_bytes(whole)
    assert train(config, quiet(tmp_path / "run"))[0]["steps_this_process"] == 30 - saved
    assert_same_run(tmp_path / "run", tmp_path / "straight", config, step=30)
