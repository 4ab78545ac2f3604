"""From parsed columns to parts: what each use makes of a field, and of the types that parquet has."""

import datetime
import io
import os

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from jaxrec.checks import UserError
from jaxrec.data.tabular import files, parts, schema, text_rows, text_tables
from jaxrec.data.tabular.parts import Made
from jaxrec.data.tabular.text_rows import Format
from jaxrec.data.tabular.text_tables import BadRows


def schema_of(**columns) -> schema.TableSchema:
    if not any(c["use"] == "label" for c in columns.values()):
        columns["y"] = {"use": "label"}
    if not any(set(c["use"] if isinstance(c["use"], list) else [c["use"]]) & {"dense", "categorical", "bag"}
               for c in columns.values()):  # fmt: skip
        columns["filler"] = {"use": "dense"}
    return schema.parse({"columns": columns}, "t.toml")


def of_text(fields: list[str], **column) -> tuple[parts.Part, list[tuple[int, str]]]:
    """Converts column `x` of a table."""
    of = schema_of(x=column)
    text = "x,y,filler\n" + "".join(f'"{field}",1,0\n' for field in fields)
    with text_rows.opened("t.csv", Format(), io.BytesIO(text.encode())) as (names, pieces):
        (piece,) = pieces
        return parts.convert(files.Parsed(*text_tables.parse(piece, "t.csv", names, Format(), parts.types_of(of))), of)


def of_arrow(tmp_path, values: pa.Array, **column) -> tuple[parts.Part, list[tuple[int, str]]]:
    """Converts column `x` of a parquet file."""
    of = schema_of(x=column)
    n = len(values)
    table = pa.table({"x": values, "y": [1] * n, "filler": [0.0] * n})
    parquet.write_table(table, tmp_path / "t.parquet")
    (file,) = files.find(tmp_path / "t.parquet", of)
    with file.opened() as (_, tasks):
        (task,) = tasks
        return parts.convert(task.parse({c.name: None for c in of.columns}), of)


def test_dense_transforms():
    values = ["3", "-3", "0", "", "  ", "1e3", "+2"]
    part, wrong = of_text(values, use="dense")
    assert wrong == []
    x = [3, -3, 0, np.nan, np.nan, 1000, 2]
    np.testing.assert_allclose(part.dense[:, 0], np.sign(x) * np.log1p(np.abs(x)), rtol=1e-6)
    np.testing.assert_allclose(of_text(values, use="dense", transform="none")[0].dense[:, 0], x)


@pytest.mark.parametrize("beside", ["5", "five"])
@pytest.mark.parametrize(
    "field", ["nan", "NaN", "inf", "-inf", "infinity", "1e999", "0x10", "1_0", "1,5", "\u0661", "--1"]
)
def test_what_is_no_number_is_malformed_whatever_stands_beside_it(field, beside):
    """A field that is no number makes the whole piece text; what the others mean must not depend on it."""
    part, wrong = of_text(["7", field, beside, "+1.5"], use="dense", transform="none")
    assert wrong[0] == (3, f"x is {field!r}, but must be a number")
    assert [line for line, _ in wrong] == ([3] if beside == "5" else [3, 4])
    assert part.dense[:, 0].tolist() == ([7, 5, 1.5] if beside == "5" else [7, 1.5])


def test_labels_and_weights():
    part, wrong = of_text(["1", "0", "1.0", "2", "", "x", "-0"], use="label")
    assert part.labels[:, 0].tolist() == [1, 0, 1, 0]
    assert [why for _, why in wrong] == [
        "x is 2, but must be 0 or 1", "x is '', but must be a number", "x is 'x', but must be a number"
    ]  # fmt: skip
    assert of_text(["1", "3.9", "4", "-5"], use="label", at_least=4)[0].labels[:, 0].tolist() == [0, 0, 1, 0]
    assert of_text(["yes", "no", "", "Yes"], use="label", positive="yes")[0].labels[:, 0].tolist() == [1, 0, 0, 0]
    part, wrong = of_text(["1", "0", "-1", "1e39", "nan", ""], use="weight")
    assert part.weight is not None and part.weight.tolist() == [1, 0]
    assert [why for _, why in wrong] == [
        "x is -1, but a weight must be at least 0", "x is 1e+39, which is beyond float32",
        "x is 'nan', but must be a number", "x is '', but must be a number",
    ]  # fmt: skip


def micros(*date) -> int:
    return int(datetime.datetime(*date, tzinfo=datetime.UTC).timestamp()) * 1_000_000


@pytest.mark.parametrize("beside", ["2020-01-01", "20200101"])  # The second is read by Python, not pyarrow.
def test_dates(beside):
    fields = ["2014-10-21", "2014-10-21 05", "1969-12-31T23:59:59.999999", "9999-12-31T23:59:59.999999", "0001-01-01"]
    wanted = [micros(2014, 10, 21), micros(2014, 10, 21, 5), -1, micros(9999, 12, 31, 23, 59, 59) + 999_999,
              micros(1, 1, 1)]  # fmt: skip
    part, wrong = of_text([*fields, beside, "0000-01-01", "2014-13-01", ""], use="time", format="iso")
    assert part.time is not None and part.time.tolist() == [*wanted, micros(2020, 1, 1)]
    assert [line for line, _ in wrong] == [8, 9, 10]
    assert wrong[1][1] == "x is '2014-13-01', but must be a date"
    part, wrong = of_text(["14102100", " 14102123 ", "1410219", "x", ""], use="time", format="%y%m%d%H")
    assert part.time is not None and part.time.tolist()[:2] == [micros(2014, 10, 21), micros(2014, 10, 21, 23)]
    assert [line for line, _ in wrong] in ([4, 5, 6], [5, 6]), "whether an hour may have one digit is the C library's"
    part, wrong = of_text(["5", "-9223372036854775808", "1.0", "9" * 5000], use="time")
    assert part.time is not None and part.time.tolist() == [5, -(2**63)] and [line for line, _ in wrong] == [4, 5]


def test_bags():
    part, _ = of_text(["a|b|a", "", "|", "|c|", "d"], use="bag")
    values = part.values["x"]
    assert values.lengths is not None and values.lengths.tolist() == [3, 0, 0, 1, 1]
    assert len(values.keys) == 4 and values.codes.tolist() == [0, 1, 0, 2, 3]
    part, _ = of_text(["", ""], use="bag", separator="; ")
    assert part.values["x"].codes.tolist() == [] and part.rows == 2


PLAIN = {"use": "dense", "transform": "none"}
PARQUET = {
    "bool": (pa.array([True, False, None]), {"use": "label"}, [1, 0]),
    "uint64": (pa.array([1, 2**64 - 1, 2**63 - 1], pa.uint64()), {"use": "time"}, [1, 2**63 - 1]),
    "float_time": (pa.array([1.0, 1.5, 1e300, float("inf"), -(2.0**63)]), {"use": "time"}, [1, -(2**63)]),
    "int64": (pa.array([1, None, 2**60]), PLAIN, [1, np.nan, 2.0**60]),
    "half": (pa.array(np.array([1.5, np.nan], np.float16)), PLAIN, [1.5, np.nan]),
    "decimal": (pa.array(["1.25", None]).cast(pa.decimal128(5, 2)), PLAIN, [1.25, np.nan]),
    "null": (pa.nulls(2), PLAIN, [np.nan, np.nan]),
    "text": (pa.array(["2", "", None]), PLAIN, [2, np.nan, np.nan]),
    "category": (pa.array(["3", "4"]).dictionary_encode(), PLAIN, [3, 4]),
    "date32": (pa.array([1, None], pa.date32()), {"use": "time", "format": "iso"}, [86_400_000_000]),
    "timestamp": (pa.array([1500], pa.timestamp("ns", "Europe/Paris")), {"use": "time", "format": "iso"}, [1]),
}  # fmt: skip


@pytest.mark.parametrize(("values", "column", "wanted"), PARQUET.values(), ids=PARQUET)
def test_types_of_parquet(values, column, wanted, tmp_path):
    part, wrong = of_arrow(tmp_path, values, **column)
    got = {"label": part.labels[:, 0], "time": part.time, "dense": part.dense[:, 0]}[column["use"]]
    np.testing.assert_array_equal(got, wanted)
    assert len(wrong) == len(values) - len(wanted)


@pytest.mark.parametrize(
    "values",
    [pa.array(["a", None, "b", "a"]), pa.array(["a", None, "b", "a"], pa.large_string()),
     pa.array(["a", None, "b", "a"]).dictionary_encode(), pa.array([b"a", None, b"b", b"a"]),
     pa.array(["a", None, "b", "a"], pa.string_view())],
    ids=lambda a: str(a.type),
)  # fmt: skip
def test_text_of_parquet_has_the_keys_of_text(values, tmp_path):
    part, _ = of_arrow(tmp_path, values, use="categorical")
    text, _ = of_text(["a", "", "b", "a"], use="categorical")
    of = [p.values["x"].keys[p.values["x"].codes].tolist() for p in (part, text)]
    assert of[0] == of[1]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda t: pa.list_(t, 2)], ids=["list", "large", "fixed"])
def test_lists_of_parquet(kind, tmp_path):
    values = pa.array([[1, 2], None, [2, None]], kind(pa.int64()))
    part, _ = of_arrow(tmp_path, values, use="bag")
    text, _ = of_text(["1|2", "", "2"], use="bag")
    assert part.values["x"].lengths.tolist() == [2, 0, 1]
    of = [p.values["x"].keys[p.values["x"].codes].tolist() for p in (part, text)]
    assert of[0] == of[1]
    with pytest.raises(UserError, match=r"column 'x' holds lists, but is of use dense; only a bag takes them"):
        of_arrow(tmp_path, values, use="dense")


@pytest.mark.parametrize(
    "values", [pa.array([{"a": 1}]), pa.array([b"\xff"]), pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))],
    ids=["struct", "bytes", "map"],
)  # fmt: skip
def test_other_types_are_refused(values, tmp_path):
    with pytest.raises(UserError, match=r"t\.parquet: column 'x' is of type .*, but must hold numbers, dates, text"):
        of_arrow(tmp_path, values, use="categorical")


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path, monkeypatch):
    """(schema, files, folder of parts): a table of several pieces, with two malformed rows."""
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 100)
    lines = [f"{i % 2},{i},v{i % 5},{i * 3}|x" for i in range(90)]
    lines[40], lines[70] = "2,0,v,", "1,1"
    (tmp_path / "t.csv").write_text("\n".join(["y,d,c,b", *lines]))
    of = schema_of(y={"use": "label"}, d={"use": "dense"}, c={"use": ["user", "categorical"]}, b={"use": "bag"})
    folder = tmp_path / "data" / ".parts"
    folder.mkdir(parents=True)
    return of, files.find(tmp_path / "t.csv", of), folder


def make(table, threads=3, allowed=2):
    bad = BadRows(allowed)
    return *parts.make(table[1], table[0], table[2], bad, threads=threads), bad


def test_parts_come_back(table):
    made, rows_in, bad = make(table)
    assert len(made) > 8 and rows_in == 90 and sum(m.rows for m in made) == 88
    assert [said.split(": ")[0] for said in bad.first] == [f"{table[1][0].path}, line {n}" for n in (42, 72)]
    loaded = [parts.load(m) for m in made]
    labels = [i % 2 for i in range(90) if i not in (40, 70)]
    assert np.concatenate([p.labels[:, 0] for p in loaded]).tolist() == labels
    assert all(set(p.values) == {"c", "b"} and p.weight is p.time is p.split is None for p in loaded)
    assert sorted(os.listdir(table[2])) == [m.path.name for m in made], "no temporary file is left"


def test_what_is_made_is_not_made_again(table, monkeypatch):
    first, _, _ = make(table)
    times = {m.path: m.path.stat().st_mtime_ns for m in first}
    first[3].path.unlink()
    first[5].path.write_bytes(first[5].path.read_bytes()[:50])  # Cut, as by a disk that lost it.
    calls = []
    convert = parts.convert
    monkeypatch.setattr(parts, "convert", lambda *a: calls.append(1) or convert(*a))
    again, rows_in, bad = make(table, threads=1)
    assert again == first and rows_in == 90 and bad.count == 2 and len(calls) == 2
    changed = {m.path for m in first if m.path.stat().st_mtime_ns != times[m.path]}
    assert changed == {first[3].path, first[5].path}


def test_malformed_rows_of_kept_parts_count(table):
    make(table)
    with pytest.raises(
        UserError, match=r"line 72: it has 2 fields, but must have 4; --max_bad_rows allows 1 malformed"
    ):
        make(table, allowed=1)


def test_damage_is_found_and_named(table):
    """Whichever byte of a part is flipped, it reads as it was or is refused."""
    made, _, _ = make(table)
    path = made[2].path
    data, whole = path.read_bytes(), parts.load(made[2])
    refused = 0
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        try:
            part = parts.load(made[2])
        except UserError as e:
            assert f"{path} is damaged: delete the folder {table[2]} and prepare again" in str(e)
            refused += 1
        else:
            np.testing.assert_equal(vars(part), vars(whole))
    assert refused > len(data) // 10
    path.unlink()
    with pytest.raises(UserError, match="is damaged"):
        parts.load(Made(path, 0, 1))


def test_the_folder_of_other_parts_is_emptied(tmp_path):
    folder = tmp_path / ".few.parts"
    with pytest.raises(KeyError), parts.kept_in(folder, {"a": 1}):
        (folder / "part").touch()
        raise KeyError
    assert parts.are_of(folder, {"a": 1}) and (folder / "part").exists(), "kept where it did not end well"
    with pytest.raises(KeyError), parts.kept_in(folder, {"a": 2}):
        assert not (folder / "part").exists() and parts.are_of(folder, {"a": 2})
        raise KeyError
    (tmp_path / ".few.parts.json").write_bytes(b"\xff")
    assert not parts.are_of(folder, {"a": 2})
    with parts.kept_in(folder, {"a": 2}):
        assert parts.are_of(folder, {"a": 2})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_keep_the_order_and_do_not_run_ahead(threads):
    """A table of any size is read with a few pieces in memory: none is asked for before its turn."""
    asked, done = [], []

    def items():
        for i in range(50):
            asked.append(i)
            yield i

    for value in parts.in_threads(lambda i: i * i, items(), threads):
        done.append(value)
        assert len(asked) <= len(done) + threads + 1
    assert done == [i * i for i in range(50)]


def test_an_error_in_a_thread_ends_the_others():
    """It is raised where its turn is, and what was not begun is not begun."""
    begun = []

    def fail(i):
        begun.append(i)
        if i == 5:
            raise UserError("the sixth")
        return i

    done = []
    with pytest.raises(UserError, match="the sixth"):
        for value in parts.in_threads(fail, range(1000), 2):
            done.append(value)
    assert done == [0, 1, 2, 3, 4] and len(begun) < 12
