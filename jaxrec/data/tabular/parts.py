"""A table's rows as arrays in files of their own, so that its text is parsed once.

A part holds the well-formed rows of a piece of a table, as `convert` makes them. Parts are made on all cores, in any
order, and kept: a preparation that was interrupted takes up those that it has.
"""

from __future__ import annotations

import collections
import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from jaxrec.checks import UserError, import_package, require
from jaxrec.data.block_writer import writing_to
from jaxrec.data.tabular.convert import Part, Values, convert, types_of
from jaxrec.data.tabular.files import TableFile
from jaxrec.data.tabular.schema import TableSchema
from jaxrec.data.tabular.text_tables import BadRows

X = TypeVar("X")
Y = TypeVar("Y")


class Made(NamedTuple):
    """What is known of a part without reading it.

    Attributes:
      path: Its file.
      file: Index of the table's file that it is of.
      rows: n.
    """

    path: Path
    file: int
    rows: int


def make(
    files: Sequence[TableFile], schema: TableSchema, folder: Path, bad_rows: BadRows, *, threads: int
) -> tuple[list[Made], int]:
    """Makes the parts of a table in `folder`, but for those that it holds already.

    Args:
      files: Of the table.
      schema: What its columns are for.
      folder: Of the parts. What it holds is of the same files and schema.
      bad_rows: Where malformed rows are counted.
      threads: That parse.

    Returns:
      The parts in the order of the rows, and how many rows there were, malformed ones included.

    Raises:
      UserError: A file cannot be read, lacks a column, or there are too many malformed rows; the disk has no room.
    """
    tqdm = import_package("tqdm", "preparing data needs the package tqdm", "tqdm").tqdm
    parts: list[Made] = []
    rows_in = taken_up = 0
    total = sum(f.bytes for f in files)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(
            tqdm(total=total, desc=f"{schema.name}: reading", unit="B", unit_scale=True, file=sys.stderr)
        )
        begun = 0
        for f, file in enumerate(files):
            with file.opened() as (names, tasks):
                missing = [c.name for c in schema.columns if c.name not in names]
                require(
                    not missing,
                    f"{file.path} has no column {(missing or [''])[0]!r} of the schema; it has: {', '.join(names)}",
                )
                types = None if file.form is None else types_of(schema)

                def made(numbered: tuple[int, Any], f: int = f, types: Any = types) -> tuple[Made, dict[str, Any], int]:
                    number, task = numbered
                    path = folder / f"part-{f:04d}-{number:06d}.npz"
                    identity = [task.start, task.size]
                    about, kept = _about(path), True
                    if about is None or about["of"] != identity:
                        wanted = types or {c.name: None for c in schema.columns if c.use != ("ignore",)}
                        parsed = task.parse(wanted)
                        part, wrong = convert(parsed, schema)
                        about = {"of": identity, "rows": part.rows, "wrong": wrong, "padded": parsed.rows.padded}
                        _save(path, part, about)
                        kept = False
                    return Made(path, f, about["rows"]), {**about, "kept": kept}, task.start + task.size

                of_file = 0
                for part, about, position in in_threads(made, enumerate(tasks), threads):
                    for line, why in about["wrong"]:
                        bad_rows.add(file.path, line, why)
                    rows_in += part.rows + len(about["wrong"])
                    taken_up += about["kept"]
                    bad_rows.padded += about["padded"]
                    if part.rows:
                        parts.append(part)
                    # Of a packed file only the unpacked position is known.
                    plain = file.form is not None and file.path.suffix != ".gz"
                    bar.update(position - of_file if plain else 0)
                    of_file = position
            begun += file.bytes
            bar.update(begun - bar.n)
    if taken_up:
        print(f"{schema.name}: {taken_up} parts were there from an interrupted preparation", file=sys.stderr)
    return parts, rows_in


def in_threads(function: Callable[[X], Y], items: Iterable[X], threads: int) -> Iterator[Y]:
    """Maps over items in order, a few at a time."""
    pool = futures.ThreadPoolExecutor(threads)
    waiting: collections.deque[futures.Future[Y]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads + 1:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _save(path: Path, part: Part, about: Mapping[str, Any]) -> None:
    arrays: dict[str, np.ndarray] = {"labels": part.labels, "dense": part.dense}
    for name in ("weight", "time", "split"):
        if (array := getattr(part, name)) is not None:
            arrays[name] = array
    for i, values in enumerate(part.values.values()):
        arrays[f"keys.{i}"], arrays[f"codes.{i}"] = values.keys, values.codes
        if values.lengths is not None:
            arrays[f"lengths.{i}"] = values.lengths
    arrays["about"] = np.frombuffer(json.dumps({**about, "columns": list(part.values)}).encode(), np.uint8)
    temporary = path.with_suffix(".tmp")
    with writing_to(path.parent.parent):
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        temporary.rename(path)


def load(made: Made) -> Part:
    """Reads a part; its file's checksums are compared.

    Raises:
      UserError: The file is damaged.
    """
    try:
        with made.path.open("rb") as opened, np.load(opened) as file:
            arrays = dict(file.items())
        names = json.loads(arrays["about"].tobytes())["columns"]
        values = {
            name: Values(arrays[f"keys.{i}"], arrays[f"codes.{i}"], arrays.get(f"lengths.{i}"))
            for i, name in enumerate(names)
        }
        rest = (arrays.get(name) for name in ("weight", "time", "split"))
        part = Part(arrays["labels"], arrays["dense"], values, *rest)
        assert part.rows == made.rows
    except Exception as e:  # A damaged file may raise anything.
        raise UserError(f"{made.path} is damaged: delete the folder {made.path.parent} and prepare again") from e
    return part


def _about(path: Path) -> dict[str, Any] | None:
    """What a part says of itself; None: there is none, or it cannot be read and must be made again."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            return json.loads(file["about"].tobytes())
    except Exception:  # A damaged file may raise anything.
        return None


def are_of(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether parts of these files and this schema are kept in the folder (see `kept_in`)."""
    try:
        return _says_of(folder).read_bytes() == _text(identity)
    except OSError:
        return False


@contextlib.contextmanager
def kept_in(folder: Path, identity: Mapping[str, Any]) -> Iterator[None]:
    """Makes the folder of the parts; one of other files or another schema is emptied first; deletes it in the end.

    It is kept where the preparation does not end well, so that the next goes on from there.
    """
    with writing_to(folder.parent):
        if not are_of(folder, identity):
            if folder.exists():
                shutil.rmtree(folder)
            temporary = folder.with_name(f"{folder.name}.tmp")
            temporary.write_bytes(_text(identity))
            temporary.rename(_says_of(folder))
        folder.mkdir(exist_ok=True)
    yield
    shutil.rmtree(folder)
    _says_of(folder).unlink()  # At last: whoever is interrupted before it goes on from there, too.


def _says_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _text(identity: Mapping[str, Any]) -> bytes:
    return json.dumps(identity, indent=1, sort_keys=True).encode()
