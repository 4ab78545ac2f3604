"""GroupLens's own files, from an archive or folder that the user has.

Three layouts: u.data and u.item (100k); ratings.dat and movies.dat, fields between `::` (1m, 10m); ratings.csv and
movies.csv (20m and later). Formats: the README of each archive, grouplens.org/datasets/movielens.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, require
from jaxrec.data.datasets.movielens import Ratings
from jaxrec.data.tabular import text_tables
from jaxrec.data.tabular.text_rows import Format
from jaxrec.data.tabular.text_tables import BadRows

# What the archives of a fixed content hold.
COUNTS = {
    "100k": 100_000, "1m": 1_000_209, "10m": 10_000_054, "20m": 20_000_263, "25m": 25_000_095, "32m": 32_000_204,
}  # fmt: skip
VARIANTS = (*COUNTS, "latest", "latest-small")
# The flags of u.item, in order.
GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip
_YEAR = re.compile(r"\((\d{4})(?:[-\u2013]\d{0,4})?\)\s*$")


class Layout(NamedTuple):
    """How a kind of archive writes its two tables.

    Attributes:
      ratings: Name of the file of ratings.
      movies: Name of the catalogue.
      delimiters: Of each.
      rating_names: Columns of the ratings; None: the first line has them.
      movie_names: Likewise.
      encodings: To be tried in turn.
    """

    ratings: str
    movies: str
    delimiters: tuple[str, str]
    rating_names: tuple[str, ...] | None
    movie_names: tuple[str, ...] | None
    encodings: tuple[str, ...]


_RATING = ("userId", "movieId", "rating", "timestamp")
LAYOUTS = (
    Layout(
        "u.data", "u.item", ("\t", "|"), _RATING,
        ("movieId", "title", "release", "video", "url", *(f"genre{i}" for i in range(len(GENRES_100K)))), ("latin-1",),
    ),
    Layout("ratings.dat", "movies.dat", ("::", "::"), _RATING, ("movieId", "title", "genres"), ("utf-8", "latin-1")),
    Layout("ratings.csv", "movies.csv", (",", ","), None, None, ("utf-8",)),
)  # fmt: skip


class Source(NamedTuple):
    """An archive or folder that holds MovieLens.

    Attributes:
      variant: One of VARIANTS.
      layout: Of its files.
      where: Folder of the files; for an archive, the archive.
      open: Opens a file of it by name.
    """

    variant: str
    layout: Layout
    where: Path
    open: Callable[[str], IO[bytes]]


@contextlib.contextmanager
def find(path: Path) -> Iterator[Source]:
    """Opens an archive or a folder; a folder within it that alone holds the files is entered.

    Raises:
      UserError: There is none, or it holds no MovieLens, or it cannot be told which.
    """
    require(path.exists(), f"--input is {str(path)!r}, which does not exist")
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            names = {str(p.relative_to(path)): p for p in [*path.glob("*"), *path.glob("*/*")] if p.is_file()}
            opener: Callable[[str], IO[bytes]] = lambda name: names[name].open("rb")  # noqa: E731
        else:
            try:
                archive = stack.enter_context(zipfile.ZipFile(path))
            except (zipfile.BadZipFile, OSError) as e:
                raise UserError(f"--input is {str(path)!r}, but must be a folder or a zip archive ({e})") from e
            names = dict.fromkeys(archive.namelist())
            opener = archive.open
        for layout in LAYOUTS:
            for name in sorted(names):
                folder, _, file = name.rpartition("/")
                movies = f"{folder}/{layout.movies}" if folder else layout.movies
                if file == layout.ratings and movies in names:
                    variant = _variant(path, folder, layout)
                    yield Source(variant, layout, path, lambda file, f=folder: opener(f"{f}/{file}" if f else file))
                    return
        pairs = " or ".join(f"{layout.ratings} with {layout.movies}" for layout in LAYOUTS)
        raise UserError(f"--input is {str(path)!r}, which holds no MovieLens: neither {pairs}")


def _variant(path: Path, folder: str, layout: Layout) -> str:
    """Returns which of VARIANTS it is, by the names of the folders and the archive: `ml-25m`."""
    if layout.ratings == "u.data":
        return "100k"
    tried = [Path(folder).name, path.name, path.stem, path.resolve().name]
    for name in tried:
        variant = name.lower().removeprefix("ml-")
        if name.lower().startswith("ml-") and variant in VARIANTS:
            return variant
    raise UserError(
        f"--input is {str(path)!r}: its name does not say which MovieLens it is; name the folder or archive ml-25m, or "
        f"after another of: {', '.join(VARIANTS)}"
    )


def read(source: Source, bad_rows: BadRows) -> tuple[Ratings, int]:
    """Reads both tables; returns them, and the rows in the file of ratings, malformed ones included.

    Raises:
      UserError: A file is not what its archive has, or has too many malformed rows.
    """
    movies, titles, genres = _catalogue(source, bad_rows)
    bad_movies = bad_rows.count
    parts: list[tuple[np.ndarray, ...]] = []
    layout, path = source.layout, source.where / source.layout.ratings
    with _file(source, layout.ratings) as data:
        form = Format(layout.delimiters[0], layout.rating_names, quoted=False)
        for rows in text_tables.read(path, bad_rows, form, data):
            _require_columns(path, rows, _RATING)
            columns, bad = [], np.zeros(len(rows.lines), bool)
            for name, dtype in zip(_RATING, ("int64", "int64", "float64", "int64"), strict=True):
                # A row that is malformed already is counted once.
                values, wrong = _numbers(rows.without(bad), name, dtype, path, bad_rows)
                columns = [c[~wrong] for c in columns]
                columns.append(values[~wrong])
                bad[np.flatnonzero(~bad)[wrong]] = True
            parts.append(tuple(columns))
    user, movie, rating, timestamp = (np.concatenate([p[i] for p in parts] or [np.empty(0)]) for i in range(4))
    rows_in, expected = len(user) + bad_rows.count - bad_movies, COUNTS.get(source.variant)
    if expected is not None and rows_in != expected:
        raise UserError(
            f"{path} has {len(user):,} ratings, but MovieLens {source.variant} has {expected:,}: it is cut, or "
            "of another name"
        )
    require(len(user) > 0, f"{path} holds no ratings")
    years = np.array([_year(t) for t in titles])
    return Ratings(user, movie, rating, timestamp, movies, years, genres), rows_in


def _catalogue(source: Source, bad_rows: BadRows) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Returns the movies' numbers, titles, and genres joined by `|`."""
    layout, path = source.layout, source.where / source.layout.movies
    with _file(source, layout.movies) as data:
        text = data.read()  # The catalogue is small.
    for encoding in layout.encodings:
        try:
            text.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    else:
        raise UserError(f"{path} is not text in {' or '.join(layout.encodings)}")
    movies, titles, genres = [], [], []
    form = Format(layout.delimiters[1], layout.movie_names, encoding, quoted=layout.movie_names is None)
    for rows in text_tables.read(path, bad_rows, form, io.BytesIO(text)):
        _require_columns(path, rows, ("movieId", "title"))
        ids, bad = _numbers(rows, "movieId", "int64", path, bad_rows)
        kept = rows.without(bad)
        movies.append(ids[~bad])
        titles += kept.columns["title"].to_pylist()
        if "genres" in kept.columns:
            genres += kept.columns["genres"].to_pylist()
        else:
            flags = np.array([kept.columns[f"genre{i}"].to_pylist() for i in range(len(GENRES_100K))]).T
            genres += ["|".join(np.array(GENRES_100K)[row == "1"]) or "unknown" for row in flags]
    return np.concatenate(movies or [np.empty(0, np.int64)]), titles, np.array(genres, object)


def _numbers(
    rows: text_tables.Rows, name: str, dtype: str, path: Path, bad_rows: BadRows
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a column's numbers [n], and bool [n]: which rows are malformed, and are counted."""
    values, why = text_tables.numbers(rows, name, dtype)
    for i, said in why.items():
        bad_rows.add(path, int(rows.lines[i]), said)
    return values, np.isin(np.arange(len(values)), list(why))


def _file(source: Source, name: str) -> IO[bytes]:
    try:
        return source.open(name)
    except (OSError, KeyError, zipfile.BadZipFile, RuntimeError) as e:
        raise UserError(f"{source.where}: {name} cannot be opened ({e})") from e


def _require_columns(path: Path, rows: Any, names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in rows.columns]
    has = ", ".join(rows.columns)
    require(not missing, f"{path} has no column {', '.join(missing)}; its first line has {has}")


def _year(title: str) -> float:
    found = _YEAR.search(title)
    return float(found[1]) if found else float("nan")
