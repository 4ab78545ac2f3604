"""Data sets on disk: round trips, interruptions, damage, and who else can read them."""

import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.data import block_writer, blocks
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.timelines import Timelines

pytest.importorskip("tensorflow_datasets", reason="preparing data needs tensorflow-datasets")
pytest.importorskip("array_record", reason="preparing data needs array_record")

FACTS = blocks.Facts(
    name="few",
    version="1.0.0",
    source="a test",
    vocabulary={"tag": 50},
    dense=("a", "b", "c"),
    labels=("click",),
    longest={"tags": 3},
    block_rows=16,
)


def make_columns(rows, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, rows, dtype=np.int32)
    lengths[16:32] = 0  # a block without a value
    return {
        "dense": rng.normal(size=(rows, 3)).astype(np.float32),
        "labels": rng.integers(0, 2, (rows, 1)).astype(np.float32),
        "timestamp": rng.integers(0, 2**40, rows),
        "flag": rng.integers(0, 256, rows, dtype=np.uint8),
        "tags": rng.integers(0, 50, lengths.sum(), dtype=np.int32),
        "tags/lengths": lengths,
    }


COLUMNS = blocks.columns_of(make_columns(1))


def make_splits(rows=(50, 16, 0)):
    return {
        name: ArrayBlocks(make_columns(n, seed), FACTS.block_rows)
        for seed, (name, n) in enumerate(zip(("train", "validation", "test"), rows, strict=True))
    }


def prepare(data_dir, splits=None, timelines=None):
    folder = data_dir / "few-1.0.0"
    given = {name: block_writer.counted(split) for name, split in (splits or make_splits()).items()}
    block_writer.prepare(folder, FACTS, COLUMNS, given, timelines)
    return folder


def assert_equal(read, given):
    assert (read.rows, read.block_rows, len(read)) == (given.rows, given.block_rows, len(given))
    for i in range(len(given)):
        assert read[i].keys() == given[i].keys()
        for name, column in given[i].items():
            assert read[i][name].dtype == column.dtype
            np.testing.assert_array_equal(read[i][name], column)


def assert_one_sentence(error, *words):
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def run(code, **options):
    """Starts Python in the repository's root."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


# --- Round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 17, 50])
def test_round_trip(tmp_path, rows):
    splits = make_splits((rows, 16, 0))
    prepared = blocks.read(prepare(tmp_path, splits))
    assert prepared.facts == FACTS
    assert prepared.columns == COLUMNS
    assert prepared.timelines is None
    assert prepared.splits.keys() == splits.keys()
    for name, split in splits.items():
        assert_equal(prepared.splits[name], split)
    with pytest.raises(IndexError):
        prepared.splits["train"][len(splits["train"])]


def test_many_files_keep_the_order(tmp_path, monkeypatch):
    monkeypatch.setattr(block_writer, "BLOCKS_PER_FILE", 3)
    splits = make_splits((16 * 35, 16, 0))
    folder = prepare(tmp_path, splits)
    assert len(list(folder.glob("rows/1.0.0/rows-train.array_record-*"))) == 12
    assert_equal(blocks.read(folder).splits["train"], splits["train"])


@pytest.mark.parametrize("counts", [[20, 0, 13, 0], [0, 0]])
def test_timelines_round_trip(tmp_path, counts):
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    events = {"movie": np.arange(offsets[-1], dtype=np.int32), "time": np.arange(offsets[-1])}
    timelines = blocks.read(prepare(tmp_path, timelines=Timelines(offsets, events))).timelines
    assert timelines is not None and timelines.name == "few"
    np.testing.assert_array_equal(timelines.offsets, offsets)
    assert timelines.columns.keys() == events.keys()
    for name, column in events.items():
        assert timelines.columns[name].dtype == column.dtype
        np.testing.assert_array_equal(timelines.columns[name], column)


def test_tfds_reads_it_wherever_it_lies(tmp_path):
    import tensorflow_datasets as tfds

    splits = make_splits()
    timelines = Timelines(np.array([0, 5, 20]), {"movie": np.arange(20, dtype=np.int32)})
    moved = shutil.copytree(prepare(tmp_path, splits, timelines), tmp_path / "elsewhere")
    rows = tfds.builder_from_directory(moved / "rows" / "1.0.0").as_data_source()
    assert rows.keys() == {"train", "validation"}  # TFDS knows no empty split
    for name, source in rows.items():
        assert len(source) == len(splits[name])
        for i in range(len(source)):
            for column, values in splits[name][i].items():
                np.testing.assert_array_equal(source[i][column], values)
    events = tfds.builder_from_directory(moved / "timelines" / "1.0.0").as_data_source()["events"]
    np.testing.assert_array_equal(events[0]["owner"], [0] * 5 + [1] * 11)
    np.testing.assert_array_equal(events[1]["movie"], np.arange(16, 20))


def test_threads_and_pickle(tmp_path):
    split = make_splits((16 * 40, 16, 0))["train"]
    read = blocks.read(prepare(tmp_path, {"train": split})).splits["train"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: read[i]["timestamp"], list(range(40)) * 10))
    np.testing.assert_array_equal(np.concatenate(found), np.tile(make_columns(16 * 40)["timestamp"], 10))
    assert_equal(pickle.loads(pickle.dumps(read)), split)


def test_existing_folders_are_left_alone(tmp_path):
    folder = prepare(tmp_path)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare(tmp_path, make_splits((7, 7, 7))) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before


# --- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [49, 51, 64, 65, 200, 16])
def test_row_counts_that_differ_are_refused(tmp_path, announced):
    given = block_writer.counted(make_splits()["train"])[1]
    with pytest.raises(UserError) as error:
        block_writer.prepare(tmp_path / "few-1.0.0", FACTS, COLUMNS, {"train": (announced, given)})
    assert_one_sentence(error, "split train", "has 50 rows", f"must have {announced}")
    assert [path.name for path in tmp_path.iterdir()] == [".few-1.0.0.lock"]


def test_malformed_blocks_are_refused(tmp_path):
    def of(columns):
        split = ArrayBlocks(columns, FACTS.block_rows)
        block_writer.prepare(tmp_path / "few-1.0.0", FACTS, COLUMNS, {"train": block_writer.counted(split)})

    columns = make_columns(20)
    with pytest.raises(ValueError, match="must have the columns"):
        of({name: column for name, column in columns.items() if name != "flag"})
    with pytest.raises(ValueError, match=r"column flag must be uint8 .* is int32"):
        of({**columns, "flag": columns["flag"].astype(np.int32)})
    with pytest.raises(ValueError, match="column dense must be"):
        of({**columns, "dense": columns["dense"][:, :2]})
    with pytest.raises(ValueError, match="every block but the last"):
        given = iter([ArrayBlocks(make_columns(5))[0], ArrayBlocks(make_columns(16))[0]])
        block_writer.prepare(tmp_path / "few-1.0.0", FACTS, COLUMNS, {"train": (21, given)})


def test_rows_that_read_back_differently_are_refused(tmp_path, monkeypatch):
    def decode(record, columns, true=blocks._decode):
        block = true(record, columns)
        block["flag"][0] ^= 1
        return block

    monkeypatch.setattr(blocks, "_decode", decode)
    with pytest.raises(UserError) as error:
        prepare(tmp_path)
    assert_one_sentence(error, "split train", str(tmp_path), "not those that were written")
    assert not (tmp_path / "few-1.0.0").exists()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as error:
        prepare(tmp_path / "file")
    assert_one_sentence(error, "--data_dir", str(tmp_path / "file"))

    def write(*_):
        raise RuntimeError("write() failed: No space left on device; writing rows")

    monkeypatch.setattr(block_writer, "_write", write)
    with pytest.raises(UserError) as error:
        prepare(tmp_path)
    assert_one_sentence(error, "--data_dir", str(tmp_path), "no room left")


@pytest.mark.parametrize("package", ["tensorflow_datasets", "array_record.python.array_record_module", "tqdm"])
def test_missing_packages_are_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError) as error:
        prepare(tmp_path)
    name = {"tensorflow_datasets": "tensorflow-datasets"}.get(package, package.split(".")[0])
    assert_one_sentence(error, f"pip install {name}")


def test_imports_are_late(tmp_path):
    folder = prepare(tmp_path)
    process = run(
        "import sys; from pathlib import Path; from jaxrec.data import blocks\n"
        "def have(): return [m for m in ('tensorflow_datasets', 'array_record', 'grain', 'jax') if m in sys.modules]\n"
        f"print(have()); blocks.read(Path({str(folder)!r})).splits['train'][0]; print(have())"
    )
    assert process.communicate()[0].split("\n")[:2] == ["[]", "['array_record']"]


def rewrite_manifest(folder, old, new):
    path = folder / "manifest.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edit_train(folder, edit):
    path = folder / "rows/1.0.0/rows-train.array_record-00000-of-00001"
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


DAMAGE = {
    "truncated": (
        lambda folder: edit_train(folder, lambda data: data.__delitem__(slice(len(data) // 2, None))),
        ("rows-train.array_record-00000-of-00001 has", "bytes where", "were written"),
    ),
    "no blocks": (
        lambda folder: edit_train(folder, lambda data: data.__setitem__(slice(None), bytes(len(data)))),
        ("rows-train.array_record-00000-of-00001 holds 0 blocks where 4 were written",),
    ),
    "missing file": (
        lambda folder: (folder / "rows/1.0.0/rows-train.array_record-00000-of-00001").unlink(),
        ("rows-train.array_record-00000-of-00001 is missing",),
    ),
    "missing timeline": (
        lambda folder: (folder / "timelines/1.0.0/timelines-events.array_record-00000-of-00001").unlink(),
        ("timelines-events.array_record-00000-of-00001 is missing",),
    ),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), ("manifest.json is missing",)),
    "manifest not JSON": (
        lambda folder: (folder / "manifest.json").write_text('{"format": 1, "fa'),
        ("manifest.json cannot be read as JSON",),
    ),
    "manifest without facts": (
        lambda folder: rewrite_manifest(folder, '"facts"', '"fact"'),
        ("manifest.json is not a manifest that jaxrec wrote",),
    ),
    "other format": (
        lambda folder: rewrite_manifest(folder, '"format": 1', '"format": 2'),
        ("manifest.json is of format version 2 where this jaxrec reads 1",),
    ),
    "other version": (
        lambda folder: rewrite_manifest(folder, '"version": "1.0.0"', '"version": "1.1.0"'),
        ("manifest.json is of data set few-1.1.0, not few-1.0.0",),
    ),
    "other number of blocks": (
        lambda folder: rewrite_manifest(folder, '"rows": 50', '"rows": 70'),
        ("manifest.json counts 70 rows but not as many blocks as they fill",),
    ),
    "other number of rows": (
        lambda folder: rewrite_manifest(folder, '"rows": 50', '"rows": 51'),
        ("rows-train.array_record-00000-of-00001 has 2 rows in record 3 where there must be 3",),
    ),
    "other columns": (
        lambda folder: rewrite_manifest(folder, '"flag"', '"flags"'),
        ("rows-train.array_record-00000-of-00001", "is damaged", "record 3"),
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    timelines = Timelines(np.array([0, 5, 20]), {"movie": np.arange(20, dtype=np.int32)})
    return prepare(tmp_path_factory.mktemp("sound"), timelines=timelines)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(sound, tmp_path, damage):
    folder = shutil.copytree(sound, tmp_path / "few-1.0.0")
    blocks.read(folder)
    act, words = DAMAGE[damage]
    act(folder)
    with pytest.raises(UserError) as error:
        blocks.read(folder)
    assert_one_sentence(error, *words, f"delete the folder {folder} so that it is prepared again")


def test_damage_inside_a_file_is_refused_where_it_is_read(sound, tmp_path):
    folder = shutil.copytree(sound, tmp_path / "few-1.0.0")

    def flip(data):
        data[200] ^= 1

    edit_train(folder, flip)
    train = blocks.read(folder).splits["train"]
    with pytest.raises(UserError) as error:
        train[0]
    assert_one_sentence(
        error, "rows-train.array_record-00000-of-00001 is damaged", "record 0", f"delete the folder {folder}"
    )
    train[3]


# --- Interruptions and races -----------------------------------------------------------------------------------------

# Prepares `few` in argv-like DATA_DIR; prints a line when the third block is asked for, then does `then`.
SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_blocks as t
from jaxrec.data import block_writer, blocks
def given(split):
    for i in range(len(split)):
        if i == 2:
            print("writing", flush=True)
            {then}
        yield split[i]
split = t.make_splits()["train"]
block_writer.prepare(Path({data_dir!r}) / "few-1.0.0", t.FACTS, t.COLUMNS, {{"train": (split.rows, given(split))}})
print("done", flush=True)
"""


def script(data_dir, then):
    return SCRIPT.format(tests=str(Path(__file__).parent), data_dir=str(data_dir), then=then)


def test_an_exception_leaves_nothing(tmp_path):
    def given():
        yield make_splits()["train"][0]
        raise UserError("the source ended")

    with pytest.raises(UserError, match=r"^the source ended$"):
        block_writer.prepare(tmp_path / "few-1.0.0", FACTS, COLUMNS, {"train": (50, given())})
    assert [path.name for path in tmp_path.iterdir()] == [".few-1.0.0.lock"]
    blocks.read(prepare(tmp_path))


def test_kill_leaves_nothing_that_reads_as_complete(tmp_path):
    process = run(script(tmp_path, "time.sleep(60)"))
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "few-1.0.0").exists()
    (stale,) = tmp_path.glob(".few-1.0.0.tmp-*")
    assert str(process.pid) in stale.name
    blocks.read(prepare(tmp_path))
    assert not stale.exists()


def test_two_processes_prepare_at_once(tmp_path):
    go = tmp_path / "go"
    code = script(tmp_path, f"while not Path({str(go)!r}).exists(): time.sleep(0.01)")
    with run(code) as first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "writing\n"
            second = run(code)
            assert second.stderr is not None
            assert "waiting for another process" in second.stderr.readline()
        finally:
            go.touch()  # whatever happened, both come to an end
        assert first.communicate()[0] == "done\n"
    assert second.communicate()[0] == "done\n"  # it found the folder, and wrote none
    assert first.returncode == second.returncode == 0
    assert_equal(blocks.read(tmp_path / "few-1.0.0").splits["train"], make_splits()["train"])


def test_without_locks_the_slower_process_discards_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(block_writer, "_wait_for", lambda *_: False)
    split = make_splits()["train"]

    def given():
        yield split[0]
        prepare(tmp_path, {"train": split})  # another process, which began later and was faster
        yield from (split[i] for i in range(1, len(split)))

    block_writer.prepare(tmp_path / "few-1.0.0", FACTS, COLUMNS, {"train": (50, given())})
    assert_equal(blocks.read(tmp_path / "few-1.0.0").splits["train"], split)
    assert sorted(os.listdir(tmp_path)) == [".few-1.0.0.lock", "few-1.0.0"]


def test_the_manifest_describes_the_rows_whatever_the_files(tmp_path, monkeypatch):
    one = json.loads((prepare(tmp_path / "a") / "manifest.json").read_text())
    monkeypatch.setattr(block_writer, "BLOCKS_PER_FILE", 1)
    other = json.loads((prepare(tmp_path / "b") / "manifest.json").read_text())
    assert len(other["splits"]["train"]["files"]) == 4
    assert one["splits"]["train"]["sha256"] == other["splits"]["train"]["sha256"]
    assert one["splits"]["train"]["sha256"] != one["splits"]["validation"]["sha256"]


def test_columns_without_elements_come_back(tmp_path):
    """A data set without dense columns may say so by an empty one."""
    facts = dataclasses.replace(FACTS, dense=())
    rows = {**make_columns(50), "dense": np.zeros((50, 0), np.float32)}
    split = ArrayBlocks(rows, FACTS.block_rows)
    folder = tmp_path / "few-1.0.0"
    block_writer.prepare(folder, facts, blocks.columns_of(rows), {"train": block_writer.counted(split)})
    got = blocks.read(folder).splits["train"]
    for k in range(len(split)):
        assert got[k]["dense"].shape == (len(split[k]["labels"]), 0)
        np.testing.assert_array_equal(got[k]["labels"], split[k]["labels"])
