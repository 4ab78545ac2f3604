"""Tables, names and times that look right and are not: told apart, or refused, never taken for something else."""

import gzip
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_wrong_inputs import assert_one_sentence

from jaxrec import prepare
from jaxrec.checks import UserError
from jaxrec.data import blocks
from jaxrec.data.tabular import convert, schema
from jaxrec.data.tabular.files import Parsed
from jaxrec.data.tabular.text_tables import Rows

SCHEMA = """
name = "t"
[split]
by = "order"
validation = 0.2
test = 0.2
[columns]
click = {use = "label"}
site = {use = "categorical", min_count = 1}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("click,site\n" + "".join(f"{i % 2},s{i % 5}\n" for i in range(60)))
    (tmp_path / "t.toml").write_text(SCHEMA)
    return tmp_path


TABLE = ("--dataset=tabular", "--schema=t.toml", "--data_dir=data")


def times(texts: list[str], form: str) -> list[int | None]:
    """What a time column makes of texts; None where they are malformed."""
    of = schema.parse(
        {"columns": {"click": {"use": "label"}, "d": {"use": "dense"}, "at": {"use": "time", "format": form}}}, "s"
    )
    (column,) = of.of("time")
    rows = Rows(np.arange(len(texts)), {"at": pa.array(texts)})
    values, why = convert._times(rows, column)
    return [None if i in why else int(v) for i, v in enumerate(values.tolist())]


@pytest.mark.parametrize(
    ("form", "texts", "seconds"),
    [
        ("%y%m%d%H", ["14102100", "14023012", "14022823"], [1413849600, None, 1393628400]),
        ("%Y-%m-%d", ["2021-02-28", "2021-02-31", "2021-04-31", "2021-2-8"], [1614470400, None, None, 1612742400]),
        ("%H:%M:%S", ["23:59:59", "23:59:61", "24:00:00"], [-2208902401 - 0, None, None]),
        ("%Y-%m-%d %z", ["2021-01-01 +0100", "2021-01-01 +0000"], [1609455600, 1609459200]),
        ("%d/%b/%Y", ["01/Mar/2024", "31/Feb/2024"], [1709251200, None]),
    ],
)
def test_dates_that_are_none_are_malformed(form, texts, seconds):
    got = times(texts, form)
    assert [g is None for g in got] == [s is None for s in seconds]
    if form != "%H:%M:%S":  # Without a day only the order counts.
        assert got == [None if s is None else s * 1_000_000 for s in seconds]


@pytest.mark.parametrize("directive", ["%G-W%V-%u", "%H %Z", "%U"])
def test_patterns_that_do_not_say_the_time_are_refused(directive):
    with pytest.raises(UserError, match="does not say which time it is"):
        times(["x"], directive)


def test_timestamps_of_parquet_that_do_not_fit_are_malformed():
    of = schema.parse({"columns": {"click": {"use": "label"}, "d": {"use": "dense"},
                                   "at": {"use": "time", "format": "iso"}}}, "s")  # fmt: skip
    for unit, values in (("s", [10**9, 10**14]), ("ms", [10**12, 10**17])):
        column = pa.array(values, pa.int64()).cast(pa.timestamp(unit))
        got, why = convert._times(Rows(np.arange(2), {"at": column}), of.of("time")[0])
        assert got[0] == 10**15 and list(why) == [1]


def test_nan_in_a_column_of_values_is_missing():
    of = schema.parse({"columns": {"click": {"use": "label"}, "u": {"use": ["user", "categorical"]}}}, "s")
    of_nan, of_null = (
        convert.convert(Parsed(Rows(np.arange(2), {"click": pa.array([0, 1]), "u": u}), []), of)[0].values["u"]
        for u in (pa.array([float("nan"), 2.0]), pa.array([None, 2.0]))
    )
    np.testing.assert_array_equal(of_nan.keys[of_nan.codes], of_null.keys[of_null.codes])


def test_the_same_name_for_other_rows_is_refused(call, here):
    """Also where the other rows came in between, while parts of these were kept."""
    (here / "bad.csv").write_text((here / "t.csv").read_text() + "9,x\n")
    assert call(prepare, *TABLE, "--input=bad.csv")[0] == 2
    few = ["--dataset=synthetic", "--name=t", "--data_dir=data", "--set=train_rows=50", "--set=validation_rows=50",
           "--set=test_rows=50"]  # fmt: skip
    assert call(prepare, *few)[0] == 0
    status, out, err = call(prepare, *TABLE, "--input=bad.csv", "--max_bad_rows=1")
    assert_one_sentence(status, err, "data/t-1.0.0 exists already, and holds other rows")
    assert '"rows_out"' not in out
    assert blocks.read(here / "data" / "t-1.0.0").facts.source.startswith("synthetic")


def test_parts_of_a_file_of_equal_size_and_time_are_not_taken(call, here):
    for folder, site in (("a", "s1"), ("b", "s2")):
        (here / folder).mkdir()
        text = "click,site\n" + "".join(f"{i % 2},{site}\n" for i in range(60))
        (here / folder / "c.csv").write_text(text + ("7,s1\n" if folder == "a" else "0,s2\n"))
        os.utime(here / folder / "c.csv", (1e9, 1e9))
    assert call(prepare, *TABLE, "--input=a/c.csv")[0] == 2
    status, out, err = call(prepare, *TABLE, "--input=b/c.csv", "--max_bad_rows=1")
    assert status == 0, err
    assert '"rows_out": 61, "bad_rows": 0' in out


def test_a_file_that_changes_while_it_is_read_is_refused(call, here, monkeypatch):
    true = convert.convert

    def growing(*arguments):
        with (here / "t.csv").open("a") as file:
            file.write("1,s1\n")
        return true(*arguments)

    monkeypatch.setattr("jaxrec.data.tabular.parts.convert", growing)
    status, _, err = call(prepare, *TABLE, "--input=t.csv")
    assert_one_sentence(status, err, "has changed while it was read", "give the command again")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: shutil.copy("t.csv", "f/\u00b21.csv"), None),
        (lambda: os.symlink("nowhere.csv", "f/b.csv"), "b.csv in it is not a file"),
        (lambda: os.mkdir("f/3.csv"), "3.csv in it is not a file"),
    ],
)
def test_folders(call, here, make, says):
    (here / "f").mkdir()
    shutil.copy("t.csv", "f/a.csv")
    make()
    status, _, err = call(prepare, *TABLE, "--input=f")
    if says is None:
        assert status == 0, err
    else:
        assert_one_sentence(status, err, says)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('by = "order"', 'by = "files"', "files.train, files.validation and files.test must be different files"),
        (
            "min_count = 1",
            "history = 1000000000000",
            "history is 1000000000000, but must be at least 0 and at most 100000",
        ),
    ],
)
def test_schemas(call, here, old, new, says):
    text = SCHEMA.replace(old, new)
    if "files" in new:
        text += '[files]\ntrain = "t.csv"\nvalidation = "t.csv"\ntest = "t.csv"\n'
    (here / "t.toml").write_text(text)
    status, _, err = call(prepare, *TABLE, "--input=.")
    assert_one_sentence(status, err, says)


def test_weights_that_leave_nothing_are_refused(call, here):
    (here / "w.csv").write_text("click,site,w\n" + "".join(f"{i % 2},s,{i % 2}\n" for i in range(60)))
    weighted = SCHEMA + 'w = {use = "weight"}\n'
    (here / "t.toml").write_text(weighted)
    status, _, err = call(prepare, *TABLE, "--input=w.csv")
    assert_one_sentence(status, err, "label click is 1 in all", "nothing to learn")
    (here / "w.csv").write_text("click,site,w\n" + "".join(f"{i % 2},s,{int(i < 40)}\n" for i in range(60)))
    status, _, err = call(prepare, *TABLE, "--input=w.csv")
    assert_one_sentence(status, err, "all rows of split test have weight 0")


@pytest.mark.parametrize("use", ["categorical", "dense", "user"])
@pytest.mark.parametrize("propose", [False, True])
def test_text_of_parquet_that_is_not_utf8_is_refused(call, here, use, propose):
    text = pa.Array.from_buffers(
        pa.string(), 60, [None, pa.py_buffer(np.arange(61, dtype=np.int32)), pa.py_buffer(b"\xff" * 60)]
    )
    pq.write_table(pa.table({"click": [i % 2 for i in range(60)], "site": text, "x": [1.0] * 60}), here / "t.parquet")
    (here / "t.toml").write_text(SCHEMA.replace('"categorical", min_count = 1', f'"{use}"') + 'x = {use = "dense"}\n')
    flags = ["--dataset=tabular", "--propose", "--schema=n.toml"] if propose else TABLE
    status, _, err = call(prepare, *flags, "--input=t.parquet")
    assert_one_sentence(status, err, "t.parquet: column 'site' holds text that is not UTF-8")


@pytest.mark.parametrize(
    "flags",
    [
        ["--dataset=criteo", f"--input={'x' * 5000}"], ["--dataset=movielens", f"--input={'x' * 5000}"],
        ["--dataset=tabular", "--input=t.csv", "--propose", f"--schema={'x' * 5000}"],
        [*TABLE, "--input=t.csv", "--data_dir=d\udcff"],
    ],
)  # fmt: skip
def test_names_that_no_file_has(call, here, flags):
    status, _, err = call(prepare, *flags)
    assert_one_sentence(status, err, "but must be a path of printable characters")


def test_a_packed_file_of_several_members_is_read_whole(call, here):
    text = (here / "t.csv").read_bytes()
    (here / "m.csv.gz").write_bytes(gzip.compress(text[:100]) + gzip.compress(text[100:]))
    status, out, err = call(prepare, *TABLE, "--input=m.csv.gz")
    assert status == 0 and '"rows_out": 60' in out, err
