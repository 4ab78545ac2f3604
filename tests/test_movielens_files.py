"""GroupLens's files: counts, values checked by hand, encodings, separators; what is not them is refused."""

import dataclasses
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from real_tables import need
from test_resume import quiet

from jaxrec import prepare
from jaxrec.checks import UserError
from jaxrec.configs import catalogue, overrides
from jaxrec.data.datasets import movielens_files
from jaxrec.data.datasets.movielens import MovielensData
from jaxrec.data.tabular.text_tables import BadRows
from jaxrec.training.loop import train


def read(path: Path, allowed: int = 0):
    bad_rows = BadRows(allowed)
    with movielens_files.find(path) as source:
        return source.variant, movielens_files.read(source, bad_rows)[0], bad_rows


def test_100k():
    variant, ratings, bad_rows = read(need("ml-100k"))
    assert (variant, bad_rows.count, len(ratings.user)) == ("100k", 0, 100_000)
    assert len(np.unique(ratings.user)) == 943 and len(ratings.movies) == 1682
    # The first line of u.data, and the first two of u.item.
    assert [int(c[0]) for c in ratings[:4]] == [196, 242, 3, 881250949]
    assert ratings.years[:2].tolist() == [1995, 1995]
    assert ratings.genres[:2].tolist() == ["Animation|Children's|Comedy", "Action|Adventure|Thriller"]
    assert ratings.genres[266] == "unknown" and np.isnan(ratings.years[266])


def test_latest_small():
    variant, ratings, _ = read(need("ml-latest-small") / "rezip_2023.zip")
    assert (variant, len(ratings.user), len(ratings.movies)) == ("latest-small", 100_836, 9742)
    assert [float(c[0]) for c in ratings[:4]] == [1, 1, 4.0, 964982703]
    assert set(np.unique(ratings.rating)) == {i / 2 for i in range(1, 11)}
    # 11,"American President, The (1995)",Comedy|Drama|Romance: the title is quoted.
    (eleven,) = np.flatnonzero(ratings.movies == 11)
    assert ratings.years[eleven] == 1995 and ratings.genres[eleven] == "Comedy|Drama|Romance"


def write_1m(folder: Path, ratings: int = 3) -> Path:
    folder.mkdir(parents=True)
    (folder / "movies.dat").write_bytes(
        "1::L\u00e9on: The Professional (1994)::Crime|Drama\n2::Alien: Resurrection (1997)::Horror\n".encode("latin-1")
    )
    (folder / "ratings.dat").write_text(
        "".join(f"{i + 1}::{i % 2 + 1}::{i % 5 + 1}::{978300760 + i}\n" for i in range(ratings))
    )
    return folder


def test_double_colons_and_latin_1(tmp_path, monkeypatch):
    monkeypatch.setitem(movielens_files.COUNTS, "1m", 3)
    folder = write_1m(tmp_path / "ml-1m")
    for path in (folder, tmp_path):  # The folder, or one that holds it.
        if path is tmp_path:
            path = path.rename(tmp_path.parent / f"{tmp_path.name}-outer")  # noqa: PLW2901
        variant, ratings, _ = read(path)
        assert variant == "1m" and ratings.movie.tolist() == [1, 2, 1] and ratings.rating.tolist() == [1, 2, 3]
        assert ratings.years.tolist() == [1994, 1997] and ratings.genres.tolist() == ["Crime|Drama", "Horror"]


def test_malformed_rows_are_named_and_counted(tmp_path):
    folder = tmp_path / "ml-latest"
    folder.mkdir()
    (folder / "movies.csv").write_text("movieId,title,genres\n1,A (2000),Drama\n")
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,4.0,5\n2,1,x,y\n3,1\n4,1,3.5,9\n")
    with pytest.raises(UserError, match=r"ratings\.csv, line \d: .*; --max_bad_rows allows 1 malformed rows"):
        read(folder, 1)
    _, ratings, bad_rows = read(folder, 2)
    assert ratings.user.tolist() == [1, 4] and ratings.rating.tolist() == [4, 3.5] and bad_rows.count == 2


def test_a_malformed_movie_is_no_rating(tmp_path, monkeypatch):
    """It is counted among the malformed rows, but neither completes an archive nor makes it too long."""
    monkeypatch.setitem(movielens_files.COUNTS, "1m", 3)
    folder = write_1m(tmp_path / "ml-1m")
    with (folder / "movies.dat").open("a") as f:
        f.write("x::A (2000)::Drama\n")
    bad_rows = BadRows(1)
    with movielens_files.find(folder) as source:
        ratings, rows_in = movielens_files.read(source, bad_rows)
    assert (len(ratings.user), rows_in, bad_rows.count, len(ratings.movies)) == (3, 3, 1, 2)
    monkeypatch.setitem(movielens_files.COUNTS, "1m", 4)
    with pytest.raises(UserError, match="has 3 ratings, but MovieLens 1m has 4"):
        read(folder, 1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda p: p / "none", "does not exist"),
        (lambda p: p, "holds no MovieLens: neither u.data with u.item"),
        (lambda p: write_1m(p / "films"), "its name does not say which MovieLens it is"),
        (lambda p: write_1m(p / "ml-1m"), r"has 3 ratings, but MovieLens 1m has 1,000,209"),
    ],
)
def test_what_is_not_movielens_is_refused(tmp_path, make, named):
    with pytest.raises(UserError, match=named):
        read(make(tmp_path))


def test_a_damaged_archive_is_refused(tmp_path):
    folder = write_1m(tmp_path / "ml-latest")
    with zipfile.ZipFile(tmp_path / "ml-latest.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in folder.iterdir():
            archive.write(file, f"ml-latest/{file.name}")
    assert len(read(tmp_path / "ml-latest.zip")[1].user) == 3
    whole = (tmp_path / "ml-latest.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"cut\.zip'.*must be a folder or a zip archive"):
        read(tmp_path / "cut.zip")
    place = whole.index(b"ratings.dat") + 15
    (tmp_path / "ml-latest.zip").write_bytes(whole[:place] + b"\0\xff" + whole[place + 2 :])
    with pytest.raises(UserError, match=r"ratings\.dat|cannot be read"):
        read(tmp_path / "ml-latest.zip")


def test_prepare_and_open(call, tmp_path):
    flags = ["--dataset=movielens", f"--input={need('ml-100k')}", f"--data_dir={tmp_path}"]
    status, out, err = call(prepare, *flags)
    assert status == 0, err
    facts = json.loads(out.splitlines()[-1])
    assert (facts["rows_in"], facts["rows_out"], facts["bad_rows"]) == (100_000, 100_000, 0)
    assert facts["bytes"] > 1 << 20 and facts["seconds"] > 0
    dataset = MovielensData(variant="100k").open(str(tmp_path))
    assert sum(split.rows for split in dataset.splits.values()) == 100_000
    assert dataset.schema.vocabulary["user"] == 943 and dataset.schema.vocabulary["movie"] == 1682
    status, _, err = call(prepare, *flags)
    assert status == 2 and "exists already; train on it with --set=data.variant=100k" in err
    shutil.rmtree(tmp_path / "movielens_100k-1.1.0")
    with pytest.raises(UserError, match=r"data.variant is '100k', but .* prepare it: python -m jaxrec.prepare"):
        MovielensData(variant="100k").open(str(tmp_path))


def test_latest_small_prepares_and_trains(call, compile_cache, tmp_path):
    archive = need("ml-latest-small", "rezip_2023.zip")
    status, out, err = call(prepare, "--dataset=movielens", f"--input={archive}", f"--data_dir={tmp_path}")
    assert status == 0, err
    assert json.loads(out.splitlines()[-1])["rows_out"] == 100_836
    config = overrides.apply(
        catalogue.get("dlrm_movielens"),
        ["data.variant=latest-small", "model.bottom_mlp=8,8", "model.top_mlp=8", "embedding.dim=8", "training.steps=4",
         "training.eval_every=0"],
    )  # fmt: skip
    summary, status = train(config, dataclasses.replace(quiet(tmp_path / "run"), data_dir=str(tmp_path)))
    assert status == 0 and np.isfinite(summary["metrics"]["test"]["ne"])
