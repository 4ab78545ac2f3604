"""Reading delimited text: every row, or its file and line."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrec.checks import UserError
from jaxrec.data.tabular import text_rows
from jaxrec.data.tabular.text_rows import Format
from jaxrec.data.tabular.text_tables import BadRows, numbers, read

PATH = Path("table.csv")


def rows_of(text: bytes, bad: BadRows | None = None, delimiter: str = ",", **options):
    """Returns (lines, columns as lists) of the whole table."""
    lines, columns = [], {}
    options.setdefault("quoted", delimiter != "::")
    for rows in read(PATH, bad or BadRows(), Format(delimiter, **options), io.BytesIO(text)):
        lines += rows.lines.tolist()
        for name, column in rows.columns.items():
            columns.setdefault(name, []).extend(column.to_pylist())
    return lines, columns


def test_fields_are_text_with_their_lines():
    lines, columns = rows_of(b'id,name\r\n1,"a ""b"", c"\n2,\n\xef\xbb\xbf3,\xc3\xa9'.replace(b"\xef\xbb\xbf", b""))
    assert lines == [2, 3, 4]
    assert columns == {"id": ["1", "2", "3"], "name": ['a "b", c', "", "\u00e9"]}
    assert rows_of(b"\xef\xbb\xbfid\n7\n")[1] == {"id": ["7"]}
    assert rows_of(b"1\t2\n3\t4\n", delimiter="\t", names=("a", "b")) == ([1, 2], {"a": ["1", "3"], "b": ["2", "4"]})
    assert rows_of(b"a\n\xe9\n", encoding="latin-1")[1] == {"a": ["\u00e9"]}
    assert rows_of(b'a,b\n"x,1\n', quoted=False)[1] == {"a": ['"x'], "b": ["1"]}


@pytest.mark.parametrize("piece", [16, 64, 1 << 20])
def test_two_byte_separators_and_lines_in_any_pieces(monkeypatch, piece):
    monkeypatch.setattr(text_rows, "PIECE_BYTES", piece)
    good = [f"{i}::t:{i}x:::{i * i}" if i % 2 else f"{i}::t:{i}::{i * i}" for i in range(60)]
    text = "\n".join(["a::b::c", *good[:30], "one::two", *good[30:], "1::2::3::4", ""]).encode()
    bad = BadRows(2)
    lines, columns = rows_of(text, bad, "::")
    assert lines == [*range(2, 32), *range(33, 63)]
    assert columns["a"] == [str(i) for i in range(60)]
    # Of three colons the first two separate.
    assert columns["c"] == [f":{i * i}" if i % 2 else str(i * i) for i in range(60)]
    assert bad.count == 2 and "line 32: it has 2 fields, but must have 3" in bad.first[0]
    assert "line 63: it has 4 fields" in bad.first[1]
    with pytest.raises(UserError, match=r"line 32: it has 2 fields, but must have 3; --max_bad_rows allows 0"):
        rows_of(text, BadRows(), "::")


def test_numbers_name_what_is_not_one():
    text = b"n,x\n1,0.5\n 2 ,1e3\n,\nx,nan\n9223372036854775808,inf\n3,-1\n"
    (rows,) = read(PATH, BadRows(), Format(), io.BytesIO(text))
    whole, why = numbers(rows, "n", "int64")
    assert whole.tolist() == [1, 2, 0, 0, 0, 3] and list(why) == [2, 3, 4]
    assert why[3] == "n is 'x', but must be a whole number"
    real, why = numbers(rows, "x", "float64", empty=-7.0)
    assert real.tolist() == [0.5, 1000.0, -7.0, 0.0, 0.0, -1.0] and list(why) == [3, 4]
    wrong = np.isin(np.arange(6), list(why))
    kept = rows.without(wrong)
    assert kept.lines.tolist() == [2, 3, 4, 7] and kept.columns["n"].to_pylist() == ["1", " 2 ", "", "3"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "is empty"),
        (b"a,b\n1,2\n\xff\xfe,1\n", "line 3: it is not UTF-8 text"),
        (b"a,b\n1,2\n\xff\n", "line 3: it is not UTF-8 text"),
        (b"a\n1\n\xc3", "line 3: it is not UTF-8 text"),
        (b"x" * (1 << 21), "longer than a megabyte"),
    ],
)
def test_what_is_no_table_is_refused(text, named):
    with pytest.raises(UserError, match=named):
        rows_of(text)


def test_files_plain_and_packed(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"a\n1\n2\n")
    with gzip.open(tmp_path / "t.csv.gz", "wb") as f:
        f.write(b"a\n1\n2\n")
    for name in ("t.csv", "t.csv.gz"):
        (rows,) = read(tmp_path / name, BadRows(), Format())
        assert rows.columns["a"].to_pylist() == ["1", "2"]
    packed = (tmp_path / "t.csv.gz").read_bytes()
    (tmp_path / "cut.csv.gz").write_bytes(packed[:-9])
    with pytest.raises(UserError, match=r"cut\.csv\.gz cannot be read"):
        list(read(tmp_path / "cut.csv.gz", BadRows(), Format()))
    with pytest.raises(UserError, match=r"none\.csv cannot be read: No such file"):
        list(read(tmp_path / "none.csv", BadRows(), Format()))


@given(st.binary(max_size=300))
def test_random_bytes_never_crash(data):
    try:
        lines, columns = rows_of(b"a,b\n" + data, BadRows(1000))
    except UserError:
        return
    assert {len(values) for values in columns.values()} <= {len(lines)}
    assert lines == sorted(set(lines))


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=2), max_size=20))
def test_whole_numbers_come_back(values):
    text = b"a,b\n" + "".join(f"{a},{b}\n" for a, b in values).encode()
    got = [numbers(rows, "b", "int64")[0] for rows in read(PATH, BadRows(), Format(), io.BytesIO(text))]
    assert np.concatenate([np.empty(0, np.int64), *got]).tolist() == [b for _, b in values]


def test_a_quote_that_is_never_closed_costs_one_row():
    """However much text follows, with other quotes or without."""
    rows = b"x,1\n" * 700_000
    for after in (b"", b'"y","2"\n', b'z,"3 ""quoted"""\n'):
        bad = BadRows(1)
        lines, columns = rows_of(b'a,b\n"open,0\n' + rows + after, bad)
        assert bad.count == 1 and "line 2: it has a quote within a field, or one that is not closed" in bad.first[0]
        assert lines == [*range(3, 700_003 + bool(after))] and columns["b"][:2] == ["1", "1"]


def test_long_fields_are_fields():
    text = b"a,b\n" + b"x" * 3_000_000 + b',"' + b"y\n" * 400_000 + b'"\nz,1\n'
    lines, columns = rows_of(text)
    assert lines == [2, 400_003] and list(map(len, columns["a"])) == [3_000_000, 1]
    assert list(map(len, columns["b"])) == [800_000, 1]


def test_an_empty_line_is_malformed_but_where_there_is_one_column():
    bad = BadRows(3)
    assert rows_of(b"a,b\n\n1,2\n\r\n3,4\n\n", bad)[0] == [3, 5] and bad.count == 3
    assert bad.first[0].endswith("line 2: it is empty, but must have 2 fields")
    assert rows_of(b"a\n\n1\n\r\n") == ([2, 3, 4], {"a": ["", "1", ""]})
    assert rows_of(b'a,b\n"x\n\ny",2\n') == ([2], {"a": ["x\n\ny"], "b": ["2"]})


def test_a_byte_order_mark_is_passed_over_at_the_beginning_alone(monkeypatch):
    monkeypatch.setattr(text_rows, "PIECE_BYTES", 4)
    text = "\ufeffa,b\n\ufeff1,2\n\ufeff3,4\n".encode()
    assert rows_of(text) == ([2, 3], {"a": ["\ufeff1", "\ufeff3"], "b": ["2", "4"]})
