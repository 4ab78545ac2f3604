"""Any text at all: every row that is told apart by a plain reader is, with its line; the others are counted by line.

1,000 cases; 100,000 with JAXREC_FULL=1 (`make fuzz`).
"""

from __future__ import annotations

import encodings.aliases
import gzip
import io
import random
from pathlib import Path

import numpy as np
import plain_preparation
import plain_tables
import pytest
from cover import FULL

from jaxrec.checks import UserError
from jaxrec.data.tabular import files, parts, schema, text_rows, text_tables
from jaxrec.data.tabular.text_rows import Format

# Hundreds of cases, with those of test_fuzz_files.py 1,000 in all.
TEXT, VALUES, ENCODINGS = (n * (100 if FULL else 1) for n in (5, 2, 1))
PATH = Path("table.csv")
LONGEST_QUOTED = 24
TOKENS = (
    b"a", b"7", b"-1.5", b"word", b" ", b"\n", b"\n", b"\r\n", b"\r", b'"', b'""', b'"\n', b'"x"', b'"a ""b"" c"',
    b"\0", b"\x1f", "\u00e9\u4e2d".encode(), b"\xff", b"\xc3", b"\xef\xbb\xbf", b":", b"'", b"\\", b"\x85",
    "\u2028".encode(), b"0x1F", b"nan", b"y" * 30, b'"' + b"z" * 30 + b'"',
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_quotes(monkeypatch):
    monkeypatch.setattr(text_rows, "LONGEST_QUOTED", LONGEST_QUOTED)


def body_of(draw: random.Random, delimiter: bytes, columns: int) -> bytes:
    """Rows that are well formed, damaged, or never were rows."""
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(60))
    separators = [delimiter] * (len(TOKENS) // 3)
    if kind == 1:
        return b"".join(draw.choice([*TOKENS, *separators]) for _ in range(draw.randrange(40)))
    end = draw.choice((b"\n", b"\r\n"))
    rows = []
    for _ in range(draw.randrange(12)):
        fields = [
            draw.choice((b"", b"a", b"12", b'"q"', b'"a,b"', b'"x\r\ny"', b'""""', b'"u\n"')) for _ in range(columns)
        ]
        rows.append(delimiter.join(fields) + end)
    text = bytearray(b"".join(rows))
    for _ in range(draw.randrange(5) if kind == 3 else 0):
        at = draw.randrange(len(text) + 1)
        text[at : at + draw.randrange(3)] = draw.choice((b"", *TOKENS, delimiter))
    return bytes(text[: draw.randrange(len(text) + 1)] if draw.random() < 0.3 else text)


def read(data: bytes, form: Format, path: Path = PATH, names: int = 0):
    """Returns the plain form of what `text_tables` finds in `data`, or in the file where there is none."""
    found = plain_tables.Plain([], [], [])
    with text_rows.opened(path, form, io.BytesIO(data) if path is PATH else None) as (columns, pieces):
        assert len(columns) == names
        for piece in pieces:
            rows, wrong = text_tables.parse(piece, path, columns, form)
            found.lines.extend(rows.lines.tolist())
            found.fields.extend(map(list, zip(*(c.to_pylist() for c in rows.columns.values()), strict=True)))
            found.bad.extend(line for line, _ in wrong)
    return found


@pytest.mark.parametrize("hundred", range(TEXT))
def test_text(hundred, monkeypatch, tmp_path):
    for case in range(100):
        draw = random.Random(f"text {hundred} {case}")
        delimiter = draw.choice((",", "\t", "|", "::"))
        quoted = delimiter != "::" and draw.random() < 0.7
        names = [f"c{i}" for i in range(draw.randint(1, 4))]
        body = body_of(draw, delimiter.encode(), len(names))
        given = draw.random() < 0.3
        form = Format(delimiter, tuple(names) if given else None, quoted=quoted)
        bom = draw.choice((b"", b"\xef\xbb\xbf"))
        data = bom + (b"" if given else delimiter.join(names).encode() + draw.choice((b"\n", b"\r\n"))) + body
        if given and body.startswith(b"\xef\xbb\xbf"):
            body = body[0 if bom else 3 :]
        said = (body, delimiter, len(names), 1 if given else 2)
        wanted = plain_tables.rows_of(*said, quoted=quoted, longest_quoted=LONGEST_QUOTED)
        for size in (draw.randint(1, 9), draw.randint(10, 200), 1 << 20):
            monkeypatch.setattr(text_rows, "PIECE_BYTES", size)
            assert read(data, form, names=len(names)) == wanted, (said, quoted, size)
        if case % 10 == 0:
            packed = tmp_path / "table.csv.gz"
            packed.write_bytes(gzip.compress(data))
            assert read(data, form, packed, len(names)) == wanted, said
            cut = draw.randrange(packed.stat().st_size)
            packed.write_bytes(packed.read_bytes()[:cut])
            try:
                read(data, form, packed, len(names))
                assert given and not cut
            except UserError as e:
                assert "table.csv.gz" in str(e)


NUMBERS = (
    "1", "0", "1.0", "-3", "+4", "2.5", ".5", "7.", "1e3", "1E-2", "1e400", "-1e400", "1e-400", "3e38", "4e38", "nan",
    "inf", "-Infinity", "0x10", "1_0", "1,5", "--1", "+-1", "", " ", " 6 ", "\t2", "\u00a05", "\u0661", "1 2", "e5",
    ".", "-", "9223372036854775807", "9223372036854775808", "-9223372036854775808", "00012", "1e5.", "1f", "NA", "null",
    "true", "9" * 400, "9" * 5000, "-0", "1\u2003",
)  # fmt: skip
OF_NUMBERS = schema.parse(
    {"columns": {
        "y": {"use": "label"}, "z": {"use": "label", "at_least": 2}, "p": {"use": "auxiliary", "positive": "1"},
        "w": {"use": "weight"}, "d": {"use": "dense"}, "n": {"use": "dense", "transform": "none"}, "t": {"use": "time"},
        "c": {"use": ["categorical", "user"]}, "b": {"use": "bag"},
    }}, "numbers.toml")  # fmt: skip


def field_of(draw: random.Random, name: str) -> str:
    """A value of a column: mostly one that is well formed."""
    if draw.random() < 0.05:
        return draw.choice(NUMBERS)
    sound = {"y": ("0", "1", "1.0"), "p": ("1", "no"), "w": ("1", "0", "0.5"), "t": ("5", "-7", " 12 ")}
    if name in "cb":
        return draw.choice(("", "a", "b|c", "|", "x" * 300, "\u00e9", "a||a"))
    return draw.choice(sound.get(name, ("1", "2", "-3.5", "1e2", "", "+7") if name in "dn" else ("1", "2", "3.25")))


@pytest.mark.parametrize("hundred", range(VALUES))
def test_values(hundred, monkeypatch):
    """Every value of every row is that of plain Python, and no other row is left out, whatever stands beside it."""
    names = [c.name for c in OF_NUMBERS.columns]
    types = parts.types_of(OF_NUMBERS)
    for case in range(100):
        draw = random.Random(f"values {hundred} {case}")
        rows = [{name: field_of(draw, name) for name in names} for _ in range(draw.randrange(20))]
        text = "\n".join([";".join(names), *(";".join(row.values()) for row in rows)]).encode()
        wanted = [plain_preparation.values_of(row, OF_NUMBERS) for row in rows]
        bad = [i + 2 for i, values in enumerate(wanted) if values is None]
        good = [values for values in wanted if values is not None]
        monkeypatch.setattr(text_rows, "PIECE_BYTES", draw.choice((40, 300, 1 << 20)))
        made, wrong = [], []
        form = Format(";")
        with text_rows.opened(PATH, form, io.BytesIO(text)) as (columns, pieces):
            for piece in pieces:
                parsed = files.Parsed(*text_tables.parse(piece, PATH, columns, form, types))
                part, why = parts.convert(parsed, OF_NUMBERS)
                made.append(part)
                wrong += why
        assert [line for line, _ in wrong] == bad, (rows, wrong)
        found = {name: np.concatenate([getattr(part, name) for part in made]) if made else np.zeros((0, 3))
                 for name in ("labels", "dense", "weight", "time")}  # fmt: skip
        np.testing.assert_array_equal(found["labels"], np.array([v["labels"] for v in good]).reshape(-1, 3))
        dense = np.array([v["dense"] for v in good]).reshape(-1, 2)
        np.testing.assert_allclose(found["dense"][:, :2], dense, rtol=1e-6)
        assert found["weight"].ravel().tolist() == np.array([v["weight"] for v in good], np.float32).tolist()
        assert found["time"].ravel().tolist() == [v["time"] for v in good]
        for c in "cb":
            keys = [part.values[c].keys[part.values[c].codes].tolist() for part in made]
            texts = [text for v in good for text in v["of"][c]]
            assert [key for of_part in keys for key in of_part] == list(map(plain_preparation.key_of, texts))


NAMES_OF_ENCODINGS = sorted(
    {*encodings.aliases.aliases.values(), "idna", "punycode", "undefined", "raw_unicode_escape"}
)


@pytest.mark.parametrize("hundred", range(ENCODINGS))
def test_encodings(hundred, monkeypatch):
    """Text of any encoding is that of UTF-8; what is not of the encoding is named, by line or file."""
    texts = 0
    for case in range(100):
        draw = random.Random(f"encodings {hundred} {case}")
        try:
            form = Format(",", ("a", "b"), draw.choice(NAMES_OF_ENCODINGS))
        except UserError as e:
            assert "must be one that Python knows" in str(e)
            continue
        texts += 1
        body = "".join(f"{draw.choice(('x', 'q', '7', 'h'))},{draw.randrange(99)}\n" for _ in range(9))
        if draw.random() < 0.3:
            body = body.replace("q", draw.choice("\u00e9\u0416\u4e2d\U0001f600"))
        try:
            data = body.encode(form.encoding)
        except UnicodeError:
            continue
        wanted = plain_tables.rows_of(body.encode(), ",", 2, 1, quoted=True, longest_quoted=LONGEST_QUOTED)
        for size in (3, 7, 1 << 20):
            monkeypatch.setattr(text_rows, "PIECE_BYTES", size)
            try:
                assert read(data, form, names=2) == wanted, (form.encoding, body)
            except UserError as e:  # Python cannot read some of its encodings bit by bit.
                assert form.encoding in ("idna", "punycode") and f"is not {form.encoding} text" in str(e)
        try:
            read(draw.randbytes(60), form, names=2)
        except UserError as e:
            assert "table.csv" in str(e)
    assert texts > 60


def test_what_is_not_of_the_encoding_is_never_text():
    """Not even where its bytes would be UTF-8."""
    for encoding, wrong in (
        ("ascii", "\u00e9".encode()),
        ("utf-8", b"\xe9"),
        ("shift_jis", b"\xff"),
        ("utf-7", b"+2AA-"),
    ):
        found = read(b"x,1\n" + wrong + b",2\ny,3\n", Format(",", ("a", "b"), encoding), names=2)
        assert found == plain_tables.Plain([1, 3], [["x", "1"], ["y", "3"]], [2])
