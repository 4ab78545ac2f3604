"""Cutting histories, against a loop."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrec.checks import UserError
from jaxrec.data.timelines import Timelines


def make(counts, dtype=np.int32):
    """Timelines whose events are numbered 100, 101, ..."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Timelines(offsets, {"movie": np.arange(100, 100 + offsets[-1], dtype=dtype)}, "few")


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7), st.data())
def test_cut_is_the_loop(counts, length, data):
    timelines = make(counts)
    owner = data.draw(st.lists(st.integers(0, len(counts) - 1), max_size=8))
    end = [data.draw(st.integers(0, counts[o])) for o in owner]
    values, lengths = timelines.cut(np.array(owner, np.int32), np.array(end, np.int32), "movie", length)
    assert values.dtype == lengths.dtype == np.int32
    assert values.shape == (len(owner), length) and lengths.shape == (len(owner),)
    for row, (o, e) in enumerate(zip(owner, end, strict=True)):
        events = [100 + sum(counts[:o]) + i for i in range(counts[o])]
        latest_first = events[:e][::-1][:length]
        assert values[row].tolist() == latest_first + [0] * (length - len(latest_first))
        assert lengths[row] == len(latest_first)


def test_owners_without_events():
    values, lengths = make([0, 0]).cut(np.array([1, 0]), np.array([0, 0]), "movie", 3)
    assert values.tolist() == [[0, 0, 0]] * 2 and lengths.tolist() == [0, 0]


@pytest.mark.parametrize(
    "owner, end, words",
    [
        (2, 0, ("'group' holds 2", "0 <= group < 2")),
        (-1, 0, ("'group' holds -1", "0 <= group < 2")),
        (1, 4, ("'position' holds 4", "group 1 has 3 events")),
        (1, -1, ("'position' holds -1", "0 <= position <= 3")),
    ],
)
def test_rows_out_of_range_are_refused(owner, end, words):
    with pytest.raises(UserError) as error:
        make([2, 3]).cut(np.array([0, owner]), np.array([1, end]), "movie", 2)
    assert all(word in str(error.value) for word in ("data set few", *words))


def test_columns_that_cannot_be_cut_are_refused():
    with pytest.raises(UserError, match="no column 'song'; there are movie"):
        make([2]).cut(np.array([0]), np.array([1]), "song", 2)
    with pytest.raises(UserError, match="'movie' holds int64"):
        make([2], np.int64).cut(np.array([0]), np.array([1]), "movie", 2)


@pytest.mark.parametrize("offsets", [[0, 2, 1, 3], [1, 3], [0, 2], []])
def test_offsets_must_describe_the_events(offsets):
    with pytest.raises(ValueError):
        Timelines(np.array(offsets, np.int64), {"movie": np.zeros(3, np.int32)})


def test_cut_is_fast():
    timelines = make([200] * 500)
    rng = np.random.default_rng(0)
    owner, end = rng.integers(0, 500, 4096), rng.integers(0, 201, 4096)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        timelines.cut(owner, end, "movie", 50)
        seconds.append(time.perf_counter() - start)
    assert 4096 / min(seconds) > 300_000
