"""Every wrong input of `jaxrec.prepare` ends with one sentence and exit status 2, and leaves no data set."""

import gzip
import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from test_wrong_inputs import assert_one_sentence

from jaxrec import prepare

TABLE = "click,hour,site,price,user\n" + "".join(
    f"{i % 2},{14102100 + i % 24},s{i % 7},{i / 4},u{i % 5}\n" for i in range(60)
)
SCHEMA = """
[split]
by = "order"
[columns]
click = {use = "label"}
hour = {use = "time", format = "%y%m%d%H"}
site = {use = "categorical"}
price = {use = "dense"}
user = {use = "user"}
"""
CRITEO = "\n".join("\t".join(["0", *"1" * 13, *("0000000a",) * 26]) for _ in range(40))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a table and its schema, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TABLE)
    Path("t.toml").write_text(SCHEMA)
    return tmp_path


def left_in(data_dir: Path) -> list[str]:
    """What a later command would find, but for locks and parts, which it takes up."""
    found = sorted(os.listdir(data_dir)) if data_dir.is_dir() else []
    return [name for name in found if not name.endswith((".lock", ".parts", ".parts.json"))]


TABLE_OF = ("--dataset=tabular", "--input=t.csv")
GIVEN = (*TABLE_OF, "--schema=t.toml")
FLAGS = {
    "no_dataset": ([], ["--dataset is ''", "movielens, criteo, tabular, synthetic"]),
    "unknown_dataset": (["--dataset=avazu"], ["--dataset is 'avazu'", "movielens, criteo, tabular, synthetic"]),
    "no_input": (["--dataset=tabular"], ["--input is not given", "file or a folder"]),
    "empty_input": (["--dataset=tabular", "--input="], ["--input is not given"]),
    "absent_input": (["--dataset=tabular", "--input=none.csv", "--schema=t.toml"],
                     ["--input is 'none.csv'", "not exist"]),
    "device": (["--dataset=tabular", "--input=/dev/null", "--schema=t.toml"],
               ["--input is '/dev/null'", "file or a folder"]),
    "long_input": (["--dataset=tabular", f"--input={'x' * 5000}", "--schema=t.toml"], ["each name of fewer than 256"]),
    "no_schema": (["--dataset=tabular", "--input=t.csv"], ["--schema is not given", "--propose writes one"]),
    "absent_schema": ([*TABLE_OF, "--schema=s.toml"], ["--schema is 's.toml'", "--propose"]),
    "schema_folder": ([*TABLE_OF, "--schema=."], ["--schema is '.'", "cannot be read"]),
    "schema_of_movielens": (["--dataset=movielens", "--input=x", "--schema=t.toml"], ["--schema", "criteo, tabular"]),
    "set_of_tabular": ([*TABLE_OF, "--set=train_rows=5"], ["--set", "synthetic"]),
    "input_of_synthetic": (["--dataset=synthetic", "--input=t.csv"], ["--input", "movielens, criteo, tabular"]),
    "name_of_movielens": (["--dataset=movielens", "--input=t.csv", "--name=x"], ["--name", "no use for it"]),
    "name": ([*TABLE_OF, "--name=../x"], ["--name is '../x'", "letters, digits, _ and -"]),
    "max_bad_rows": ([*TABLE_OF, "--max_bad_rows=-1"], ["--max_bad_rows is -1", "negative"]),
    "max_bad_rows_text": ([*TABLE_OF, "--max_bad_rows=all"], ["max_bad_rows=all"]),
    "min_count": ([*TABLE_OF, "--min_count=0"], ["--min_count is 0", "at least 1"]),
    "max_table_rows": ([*TABLE_OF, "--max_table_rows=1"], ["--max_table_rows is 1", "at least 2"]),
    "threads": ([*TABLE_OF, "--threads=0"], ["--threads is 0", "at least 1"]),
    "vocabulary": ([*GIVEN, "--vocabulary=all"],
                   ["--vocabulary is 'all'", "frequency, hash"]),
    "compression": ([*TABLE_OF, "--compression=gzip"], ["--compression is 'gzip'", "zstd, none"]),
    "data_dir": ([*GIVEN, "--data_dir=t.csv"],
                 ["--data_dir is 't.csv'", "folder that can be written"]),
    "data_dir_proc": ([*GIVEN, "--data_dir=/proc/x"],
                      ["--data_dir is '/proc/x'", "folder that can be written"]),
    "long_name": ([*GIVEN, f"--name={'n' * 300}"],
                  ["--data_dir", "File name too long"]),
    "no_flag": (["tabular"], ["'tabular' is no flag", "--name=value"]),
    "unknown_flag": (["--dataset=tabular", "--rows=5"], ["rows"]),
    "synthetic_set": (["--dataset=synthetic", "--set=rows=0"], ["rows is 0"]),
    "synthetic_path": (["--dataset=synthetic", "--set=rowz=0"], ["--set rowz", "no field 'rowz'"]),
    "propose_over": ([*TABLE_OF, "--propose", "--schema=t.toml"],
                     ["--schema is 't.toml'", "exists; name a file to be written"]),
    "propose_nowhere": ([*TABLE_OF, "--propose", "--schema=none/x.toml"],
                        ["--schema is 'none/x.toml'", "cannot be written"]),
    "propose_absent": (["--dataset=tabular", "--input=none.csv", "--propose"],
                       ["--input is 'none.csv'", "does not exist"]),
    "propose_of_movielens": (["--dataset=movielens", "--input=t.csv", "--propose"], ["--propose", "criteo, tabular"]),
    "criteo_absent": (["--dataset=criteo", "--input=none"], ["--input is 'none'", "does not exist"]),
    "criteo_of_another": (["--dataset=criteo", "--input=t.csv"], ["t.csv has no column label", "40 fields", "tabs"]),
    "empty_folder": (["--dataset=tabular", "--input=empty", "--schema=t.toml"],
                     ["--input is 'empty'", ".csv", ".parquet"]),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "named"), FLAGS.values(), ids=FLAGS)
def test_flags(argv, named, call, here):
    Path("empty").mkdir()
    status, out, err = call(prepare, f"--data_dir={here / 'data'}", *argv)
    assert_one_sentence(status, err, *named)
    assert out == "" and left_in(here / "data") == []
    assert sorted(os.listdir(here)) in (["empty", "t.csv", "t.toml"], ["data", "empty", "t.csv", "t.toml"])


# What replaces what in the schema, and what the sentence says.
SCHEMAS = {
    "not_toml": ("[columns]", "[columns", ["t.toml is not TOML"]),
    "deep": ("[split]", f"x = {'[' * 5000}\n[split]", ["t.toml is not TOML"]),
    "digits": ("[split]", f"name = {'9' * 5000}\n[split]", ["t.toml is not TOML"]),
    "unknown_part": ("[split]", "[splits]", ["t.toml: splits is not known", "name, files, split, ids, columns"]),
    "unknown_rule": ('by = "order"', 'by = "date"', ["t.toml: split.by is 'date'", "order, time, random"]),
    "rule_number": ('by = "order"', "by = 5", ["t.toml: split.by is '5'", "text"]),
    "share": ('by = "order"', "test = 1.5", ["t.toml: split.test is 1.5", "between 0 and 1"]),
    "share_infinite": ('by = "order"', "test = inf", ["t.toml: split.test is 'inf'", "a number"]),
    "share_huge": ('by = "order"', f"test = 1{'0' * 400}", ["t.toml: split.test is '1000", "a number"]),
    "shares": ('by = "order"', "test = 0.5\nvalidation = 0.5", ["split.validation and split.test are 0.5 and 0.5"]),
    "seed": ('by = "order"', 'by = "random"\nseed = -1', ["t.toml: split.seed is -1", "at least 0"]),
    "no_split_column": ('by = "order"', 'by = "column"', ["t.toml: split.by is 'column'", "no column is of use split"]),
    "no_files": ('by = "order"', 'by = "files"', ["t.toml: split.by is 'files', but files.train is not given"]),
    "file_absent": ('[split]\nby = "order"', '[files]\ntrain="a"\nvalidation="b"\ntest="c"\n[split]\nby = "files"',
                    ["--input is 't.csv'", "files.train of the schema, t.csv/a, is not a file"]),
    "file_nul": ('[split]\nby = "order"', '[files]\ntrain="a\\u0000"\nvalidation="b"\ntest="c"\n[split]\nby = "files"',
                 ["files.train of the schema", "is not a file"]),
    "name": ("[split]", 'name = "a/b"\n[split]', ["t.toml: name is 'a/b'", "letters, digits, _ and -"]),
    "encoding": ("[split]", '[files]\nencoding = "utf-9"\n[split]', ["t.toml: the encoding is 'utf-9'"]),
    "codec": ("[split]", '[files]\nencoding = "base64"\n[split]', ["t.toml: the encoding is 'base64'"]),
    "delimiter": ("[split]", '[files]\ndelimiter = ",,"\n[split]', ["t.toml: the delimiter is ',,'", "ASCII"]),
    "names": ("[split]", '[files]\nnames = ["a", "a"]\n[split]', ["t.toml: files.names", "different names"]),
    "quoted": ("[split]", '[files]\nquoted = "yes"\n[split]', ["t.toml: files.quoted is 'yes'", "true or false"]),
    "ids": ("[split]", "[ids]\nmin_count = 0\n[split]", ["t.toml: ids.min_count is 0", "at least 1"]),
    "ids_rows": ("[split]", "[ids]\nmax_rows = 1\n[split]", ["t.toml: ids.max_rows is 1", "at least 2"]),
    "use": ('"dense"', '"numeric"', ["t.toml: columns.price.use is 'numeric'", "label, auxiliary"]),
    "no_use": ('price = {use = "dense"}', "price = {}", ["t.toml: columns.price.use is None", "label, auxiliary"]),
    "empty_use": ('"dense"', "[]", ["t.toml: columns.price.use is []"]),
    "no_table": ('price = {use = "dense"}', "price = 5", ["t.toml: columns.price is 5"]),
    "uses": ('"dense"', '["label", "auxiliary"]', ["columns.price.use is ['label', 'auxiliary']", "exclude"]),
    "bag_user": ('user = {use = "user"}', 'user = {use = ["user", "bag"]}', ["columns.user.use", "exclude each other"]),
    "leak": ('"dense"', '["dense", "label"]', ["columns.price.use is ['dense', 'label']", "exclude each other"]),
    "setting": ('"dense"', '"dense", history = 5', ["t.toml: columns.price.history is not known", "transform"]),
    "transform": ('"dense"', '"dense", transform = "sqrt"',
                  ["columns.price.transform is 'sqrt'", "log, standard, none"]),
    "combiner": ('"categorical"', '"categorical", combiner = "max"', ["columns.site.combiner is 'max'"]),
    "format": ('"%y%m%d%H"', '"yymmdd"', ["columns.hour.format is 'yymmdd'", "number, iso", "strptime"]),
    "max_rows": ('"categorical"', '"categorical", max_rows = 4294967296', ["columns.site.max_rows", "below 2^31"]),
    "two_users": ('"categorical"', '"user"', ["t.toml: columns site, user are of use user", "only one"]),
    "no_label": ('"label"', '"ignore"', ["t.toml: no column is of use label"]),
    "no_features": ('site = {use = "categorical"}\nprice = {use = "dense"}\n', "",
                    ["no column is of use dense, categorical or bag"]),
    "history": ('user = {use = "user"}', 'user = {use = "categorical", history = 5}',
                ["a history needs a column of use user"]),
    "history_name": ('"categorical"}', '"categorical", history = 5}\nsite_history = {use = "dense"}',
                     ["the history of column site is feature site_history"]),
    "shared": ('"dense"', '"categorical", table = "site", min_count = 7',
               ["columns site and price share table 'site'"]),
    "absent_column": ("price =", "cost =", ["t.csv has no column 'cost'", "click, hour, site, price, user"]),
    "one_class": ('"label"', '"label", at_least = -1', ["label click is 1 in all 48 training rows"]),
    "no_rows_left": ('by = "order"', 'by = "order"\ntest = 0.001', ["split test has no rows", "split.by = 'order'"]),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "named"), SCHEMAS.values(), ids=SCHEMAS)
def test_schemas(old, new, named, call, here):
    assert SCHEMA.count(old) == 1
    text = SCHEMA.replace(old, new)
    Path("t.toml").write_text(text)
    status, out, err = call(prepare, "--dataset=tabular", "--input=t.csv", "--schema=t.toml", "--data_dir=data")
    assert_one_sentence(status, err, *named)
    assert out == "" and left_in(here / "data") == []


def as_parquet(**columns) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


def line(number: int, text: str) -> bytes:
    lines = TABLE.splitlines()
    lines[number - 1] = text
    return "\n".join(lines).encode("latin-1")


SOUND = {"hour": ["14102100"] * 9, "site": ["a"] * 9, "price": [1.0] * 9, "user": ["u"] * 9}
FILES = {
    "empty": ("t.csv", b"", ["t.csv is empty", "the columns' names"]),
    "header_only": ("t.csv", b"click,hour,site,price,user\n", ["t.csv has no rows"]),
    "no_header": ("t.csv", b"0,14102100,a,1,u\n" * 5, ["t.csv has no column 'click'", "it has: 0, 14102100, a, 1, u"]),
    "binary": ("t.csv", bytes(range(256)) * 20, ["t.csv"]),
    "old_macintosh": ("t.csv", TABLE.replace("\n", "\r").encode(), ["t.csv: its first line is"]),
    "twice": ("t.csv", b"click,click\n0,1\n", ["t.csv: its first line names column 'click' twice"]),
    "utf_16": ("t.csv", TABLE.encode("utf-16"), ["t.csv"]),
    "fields": ("t.csv", line(9, "1,2"), ["t.csv, line 9: it has 2 fields, but must have 5; --max_bad_rows allows 0"]),
    "blank_line": ("t.csv", line(9, ""), ["t.csv, line 9: it is empty, but must have 5 fields"]),
    "encoding": ("t.csv", line(9, "1,14102100,\xe9,1,u"), ["t.csv, line 9: it is not UTF-8 text"]),
    "quote": ("t.csv", line(9, '1,14102100,a"b,1,u'), ["t.csv, line 9: it has a quote within a field"]),
    "label": ("t.csv", line(9, "2,14102100,a,1,u"), ["t.csv, line 9: click is 2, but must be 0 or 1"]),
    "no_label": ("t.csv", line(9, ",14102100,a,1,u"), ["t.csv, line 9: click is '', but must be a number"]),
    "nan": ("t.csv", line(9, "1,14102100,a,nan,u"), ["t.csv, line 9: price is 'nan', but must be a number"]),
    "infinite": ("t.csv", line(9, "1,14102100,a,-inf,u"), ["t.csv, line 9: price is '-inf', but must be a number"]),
    "date": ("t.csv", line(9, "1,14132100,a,1,u"), ["t.csv, line 9: hour is '14132100', but must be a date like %y%m"]),
    "one_class": ("t.csv", TABLE.replace("\n1,", "\n0,").encode(), ["label click is 0 in all 48 training rows"]),
    "few_rows": ("t.csv", TABLE[: TABLE.index("\n", 60)].encode(), ["has no rows with split.by = 'order'"]),
    "cut_gz": ("t.csv.gz", gzip.compress(TABLE.encode())[:-20], ["t.csv.gz cannot be read"]),
    "not_gz": ("x.csv.gz", TABLE.encode(), ["x.csv.gz cannot be read"]),
    "not_parquet": ("t.parquet", TABLE.encode(), ["t.parquet cannot be read as parquet"]),
    "cut_parquet": ("t.parquet", as_parquet(click=[0.0] * 9, **SOUND)[:-9], ["t.parquet cannot be read as parquet"]),
    "parquet_label": ("t.parquet", as_parquet(click=[0, 1, 0, 3, 0, 0, 0, 0, 0], **SOUND),
                      ["t.parquet, line 4: click is 3"]),
    "parquet_struct": ("t.parquet", as_parquet(click=[{"a": 1}] * 9, **SOUND), ["column 'click' is of type struct"]),
    "parquet_list": ("t.parquet", as_parquet(click=[[1]] * 9, **SOUND), ["column 'click' holds lists"]),
    "parquet_column": ("t.parquet", as_parquet(**SOUND), ["t.parquet has no column 'click'"]),
}  # fmt: skip


@pytest.mark.parametrize(("name", "data", "named"), FILES.values(), ids=FILES)
def test_files(name, data, named, call, here):
    Path(name).write_bytes(data)
    status, out, err = call(prepare, "--dataset=tabular", f"--input={name}", "--schema=t.toml", "--data_dir=data")
    assert_one_sentence(status, err, *named)
    assert out == "" and left_in(here / "data") == []


def test_criteo_files(call, here):
    for name, text, named in (
        ("long.txt", CRITEO.replace("\n", "\t\n", 1), ["long.txt, line 1: it has 41 fields, but must have 14 to 40"]),
        (
            "hex.txt",
            CRITEO.replace("0000000a\n", "0000000x\n", 1),
            ["hex.txt, line 1: C26 is '0000000x', but must be 8"],
        ),
        ("count.txt", CRITEO.replace("0\t1", "0\tx", 1), ["count.txt, line 1: I1 is 'x', but must be a number"]),
        ("one.txt", CRITEO, ["label label is 0 in all 34 training rows"]),
    ):
        Path(name).write_text(text)
        status, out, err = call(prepare, "--dataset=criteo", f"--input={name}", "--data_dir=data")
        assert_one_sentence(status, err, *named)
        assert out == "" and left_in(here / "data") == []


def test_a_prepared_name_is_not_used_again(call, here):
    flags = [*GIVEN, "--data_dir=data"]
    assert call(prepare, *flags)[0] == 0
    assert os.listdir(here / "data") and left_in(here / "data") == ["t-1.0.0"]
    status, _, err = call(prepare, *flags)
    assert_one_sentence(status, err, "data/t-1.0.0 exists already", "data.table=t", "--name")
    assert call(prepare, *flags, "--name=other")[0] == 0


def test_the_package_that_reads_tables_is_named(call, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, err = call(prepare, "--dataset=tabular", "--input=t.csv", "--schema=t.toml", "--data_dir=data")
    assert_one_sentence(status, err, "needs the package pyarrow", "pip install 'jaxrec[prepare]'")
