"""A preparation that is killed, stopped, or meets a full disk or damage, at any point: nothing half done is left."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cover import FULL
from test_wrong_inputs import assert_one_sentence

from jaxrec.checks import UserError
from jaxrec.data import blocks
from jaxrec.data.datasets.tabular import TabularData

pytest.importorskip("tensorflow_datasets", reason="preparing data needs tensorflow-datasets")

SCHEMA = """
name = "shop"
[split]
by = "time"
[columns]
y = {use = "label"}
at = {use = "time"}
who = {use = "user"}
item = {use = "categorical", history = 4}
tags = {use = "bag"}
x = {use = "dense", transform = "standard"}
"""
ROWS, BAD = 600, 3
PIECE = 3000  # Six pieces of the table.


def table(seed: int = 0) -> str:
    draw = random.Random(seed)
    lines = [
        f"{draw.randrange(2)},{draw.randrange(500)},u{draw.randrange(40)},i{draw.randrange(90)},"
        f"{'|'.join(f't{draw.randrange(30)}' for _ in range(draw.randrange(3)))},{draw.gauss(0, 1):.6f}"
        for _ in range(ROWS - BAD)
    ]
    for at in (50, 300, 301):
        lines.insert(at, "2,1,u,i,t,0")
    return "\n".join(["y,at,who,item,tags,x", *lines]) + "\n"


@pytest.fixture(scope="module")
def runs():
    """Returns `runs(*runs)`: what becomes of each; see fork_prepare.py."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    script = Path(__file__).with_name("fork_prepare.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def ask(*given: dict) -> list[dict]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait(10)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    (folder / "t.csv").write_text(table())
    (folder / "t.toml").write_text(SCHEMA)
    return folder


@pytest.fixture
def given(source, tmp_path):
    """Returns `given(**settings)`: a run of the preparation in the test's own folder."""
    argv = ["--dataset=tabular", f"--input={source}/t.csv", f"--schema={source}/t.toml", f"--data_dir={tmp_path}/data",
            "--threads=2", f"--max_bad_rows={BAD}"]  # fmt: skip
    return lambda *flags, **settings: {"argv": [*argv, *flags], "piece": PIECE, **settings}


def digests(folder: Path) -> dict:
    manifest = json.loads((folder / "manifest.json").read_text())
    splits = {**manifest["splits"], "events": manifest["timelines"]["events"]}
    return {"facts": manifest["facts"], **{name: entry["sha256"] for name, entry in splits.items()}}


@pytest.fixture(scope="module")
def straight(runs, source, tmp_path_factory):
    """(what becomes of a preparation that nothing befalls, its digests)."""
    data = tmp_path_factory.mktemp("straight") / "data"
    argv = ["--dataset=tabular", f"--input={source}/t.csv", f"--schema={source}/t.toml", f"--data_dir={data}"]
    (said,) = runs({"argv": [*argv, "--threads=2", f"--max_bad_rows={BAD}"], "piece": PIECE})
    assert said["status"] == 0, said["err"]
    assert said["parsed"] == 6 and said["changes"] > 50
    return said, digests(data / "shop-1.0.0")


def left_in(data: Path) -> list[str]:
    return sorted(name for name in os.listdir(data) if not name.endswith(".lock"))


def parts_in(data: Path) -> int:
    return len(list(data.glob(".shop-1.0.0.parts/part-*.npz")))


def assert_completes(runs, run: dict, data: Path, straight, *, parsed: int | None = None) -> None:
    """The same command again ends with the data set that it would have made at once."""
    kept = parts_in(data)
    (again,) = runs(run)
    assert again["status"] == 0, again["err"]
    assert again["parsed"] == (straight[0]["parsed"] - kept if parsed is None else parsed)
    facts = json.loads(again["out"].splitlines()[-1])
    assert (facts["rows_in"], facts["rows_out"], facts["bad_rows"]) == (ROWS, ROWS - BAD, BAD)
    assert again["out"].count("left out") == BAD
    assert digests(data / "shop-1.0.0") == straight[1]
    assert left_in(data) == ["shop-1.0.0"]


# Of some 60 changes that a preparation makes to the file system, every sixth; all with JAXREC_FULL=1.
@pytest.mark.parametrize("offset", range(6) if FULL else [3])
def test_killed_at_any_change_it_goes_on(offset, runs, given, straight, tmp_path):
    data = tmp_path / "data"
    for at in range(1 + offset, straight[0]["changes"] + 3, 6):
        (said,) = runs(given(signal=signal.SIGKILL, at=at))
        if said["status"] == 0:  # Two threads make a change more or less.
            assert at > straight[0]["changes"] - 4
        else:
            assert said["status"] == -signal.SIGKILL, said["err"]
            if (data / "shop-1.0.0").exists():
                assert digests(data / "shop-1.0.0") == straight[1]
            elif data.exists() and parts_in(data):
                assert ".shop-1.0.0.parts.json" in left_in(data)
            assert_completes(runs, given(), data, straight)
        shutil.rmtree(data)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.95])
def test_stopped_it_cleans_up_and_goes_on(number, status, share, runs, given, straight, tmp_path):
    data = tmp_path / "data"
    (said,) = runs(given(signal=number, at=round(share * straight[0]["changes"])))
    assert said["status"] == status and "Traceback" not in said["err"]
    assert said["err"].endswith("interrupted\n") == (number == signal.SIGINT)
    assert [name for name in left_in(data) if ".tmp" in name] == []
    if "shop-1.0.0" not in left_in(data):
        assert_completes(runs, given(), data, straight)


def test_a_full_disk_ends_in_a_sentence(runs, given, straight, tmp_path):
    """Whichever file it is that finds no room: a part, counts, blocks."""
    data = tmp_path / "data"
    met = set()
    for limit in (0, 400, 4000, 6000, 8000, 12_000):
        (said,) = runs(given(limit=limit))
        met.add("writing rows" in said["err"])
        assert_one_sentence(
            said["status"], said["err"], f"--data_dir is '{data}'", "no room left", "make room and give"
        )
        assert left_in(data) in ([], [".shop-1.0.0.parts", ".shop-1.0.0.parts.json"], [".shop-1.0.0.parts.tmp"])
    assert met == {False, True}, "while reading and while writing"
    assert parts_in(data) == 6
    assert_completes(runs, given(), data, straight)


def test_two_at_once(runs, given, straight, tmp_path):
    """Of two of the same name one waits, then finds that all is done; others do not meet."""
    data = tmp_path / "data"
    said = sorted(runs(given(), given(), given("--name=other")), key=lambda one: one["status"])
    assert [one["status"] for one in said] == [0, 0, 2]
    assert "waiting for another process" in said[2]["err"]
    assert_one_sentence(2, said[2]["err"], "shop-1.0.0 exists already")
    assert digests(data / "shop-1.0.0") == straight[1]
    assert {**digests(data / "other-1.0.0"), "facts": 0} == {**straight[1], "facts": 0}
    assert left_in(data) == ["other-1.0.0", "shop-1.0.0"]


def killed_with_parts(runs, given, data: Path, straight) -> int:
    """Kills a preparation when its parts are made; returns how many there are."""
    (said,) = runs(given(signal=signal.SIGKILL, at=round(0.6 * straight[0]["changes"])))
    assert said["status"] == -signal.SIGKILL and parts_in(data) == 6
    return parts_in(data)


@pytest.mark.parametrize("what", ["file", "schema", "flag"])
def test_parts_of_another_table_are_not_taken(what, runs, given, straight, source, tmp_path):
    killed_with_parts(runs, given, tmp_path / "data", straight)
    shutil.copytree(source, tmp_path / "changed")
    if what == "file":
        (tmp_path / "changed" / "t.csv").write_text(table(seed=1))
    elif what == "schema":
        (tmp_path / "changed" / "t.toml").write_text(SCHEMA.replace("standard", "log"))
    extra = ["--min_count=5"] if what == "flag" else []
    found = []
    for data in (tmp_path / "data", tmp_path / "fresh"):
        argv = [
            f"--input={tmp_path}/changed/t.csv",
            f"--schema={tmp_path}/changed/t.toml",
            f"--data_dir={data}",
            *extra,
        ]
        (said,) = runs(given(*argv))
        assert (said["status"], said["parsed"]) == (0, 6), said["err"]
        found.append(digests(data / "shop-1.0.0"))
        assert left_in(data) == ["shop-1.0.0"]
    assert found[0] == found[1] != straight[1]


def test_malformed_rows_of_kept_parts_are_counted(runs, given, straight, tmp_path):
    data = tmp_path / "data"
    (said,) = runs(given(f"--max_bad_rows={BAD - 1}"))
    assert_one_sentence(said["status"], said["err"], "t.csv, line 303: y is 2", f"--max_bad_rows allows {BAD - 1}")
    kept = parts_in(data)
    assert kept > 2
    (said,) = runs(given(f"--max_bad_rows={BAD - 1}"))
    assert_one_sentence(said["status"], said["err"], "t.csv, line 303: y is 2")
    assert_completes(runs, given(), data, straight)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_damaged_part_is_named(runs, given, straight, tmp_path):
    data = tmp_path / "data"
    killed_with_parts(runs, given, data, straight)
    part = data / ".shop-1.0.0.parts" / "part-0000-000002.npz"
    flip(part, 200)
    (said,) = runs(given())
    assert_one_sentence(said["status"], said["err"], f"{part} is damaged: delete the folder {part.parent}")
    shutil.rmtree(part.parent)
    assert_completes(runs, given(), data, straight)


def everything_in(folder: Path) -> list:
    """Reads all rows and timelines."""
    dataset = TabularData("shop").open(str(folder.parent))
    assert dataset.timelines is not None
    read = [{k: v.tolist() for k, v in s[i].items()} for s in dataset.splits.values() for i in range(len(s))]
    return [*read, dataset.timelines.offsets.tolist(), {k: v.tolist() for k, v in dataset.timelines.columns.items()}]


def test_a_damaged_data_set_is_named(runs, given, straight, tmp_path):
    """Whichever byte of a file is flipped, its rows are as they were, or the file is named."""
    (said,) = runs(given())
    assert said["status"] == 0
    folder = tmp_path / "data" / "shop-1.0.0"
    whole = everything_in(folder)
    files = sorted(folder.glob("*/1.0.0/*.array_record-*"))
    assert len(files) == 4
    for path in files:
        refused = 0
        filled = [at for at, byte in enumerate(path.read_bytes()) if byte]  # Most of a small file is padding.
        for at in random.Random(0).sample(filled, min(len(filled), 2000 if FULL else 25)):
            flip(path, at)
            try:
                assert everything_in(folder) == whole, (path, at)
            except UserError as e:
                assert str(path) in str(e) and f"delete the folder {folder}" in str(e)
                refused += 1
            flip(path, at)
        assert refused >= 3, path
    assert blocks.read(folder).facts.name == "shop"
