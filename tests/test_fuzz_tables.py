"""Any text at all: every row that is told apart by a plain reader is, with its line; the others are counted by line.

1,000 cases; 100,000 with JAXREC_FULL=1 (`make fuzz`).
"""

from __future__ import annotations

import gzip
import io
import random
from pathlib import Path

import plain_tables
import pytest
from cover import FULL

from jaxrec.checks import UserError
from jaxrec.data.tabular import text_tables
from jaxrec.data.tabular.text_tables import Format

# Cases of each test, of a hundred in all.
HUNDREDS = 1000 if FULL else 10
PATH = Path("table.csv")
LONGEST_QUOTED = 24
TOKENS = (
    b"a", b"7", b"-1.5", b"word", b" ", b"\n", b"\n", b"\r\n", b"\r", b'"', b'""', b'"\n', b'"x"', b'"a ""b"" c"',
    b"\0", b"\x1f", "\u00e9\u4e2d".encode(), b"\xff", b"\xc3", b"\xef\xbb\xbf", b":", b"'", b"\\", b"\x85",
    "\u2028".encode(), b"0x1F", b"nan", b"y" * 30, b'"' + b"z" * 30 + b'"',
)  # fmt: skip


@pytest.fixture(autouse=True)
def short_quotes(monkeypatch):
    monkeypatch.setattr(text_tables, "LONGEST_QUOTED", LONGEST_QUOTED)


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
    with text_tables.opened(path, form, io.BytesIO(data) if path is PATH else None) as (columns, pieces):
        assert len(columns) == names
        for piece in pieces:
            rows, wrong = text_tables.parse(piece, path, columns, form)
            found.lines.extend(rows.lines.tolist())
            found.fields.extend(map(list, zip(*(c.to_pylist() for c in rows.columns.values()), strict=True)))
            found.bad.extend(line for line, _ in wrong)
    return found


@pytest.mark.parametrize("hundred", range(HUNDREDS * 6 // 10))
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
            monkeypatch.setattr(text_tables, "PIECE_BYTES", size)
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
