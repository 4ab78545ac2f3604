"""Rows of block columns to batches."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.checks import UserError
from jaxrec.data.assemble import assemble, empty_rows, pack, pad, stack
from jaxrec.data.schema import FeatureSpec, Schema

SCHEMA = Schema(
    features=(
        FeatureSpec("movie", "categorical", "movies"),
        FeatureSpec("watched", "history", "movies", "mean", 3, column="movie"),
        FeatureSpec("genres", "bag", "genres", "sum", 2),
        FeatureSpec("user", "categorical", "users", column="group"),
    ),
    vocabulary={"movies": 10, "genres": 4, "users": 6},
    dense=("age", "price"),
    labels=("click", "like"),
)
WHERE = "data set shop, split train"


def block(**changes):
    columns = {
        "movie": np.array([1, 9, 3], np.int32),
        "genres": np.array([1, 2, 3, 0], np.int32),
        "genres/lengths": np.array([3, 0, 1], np.int32),
        "group": np.array([5, 0, 2], np.int32),
        "position": np.array([2, 0, 1], np.int32),
        "dense": np.array([[0.5, 1], [2, 3], [4, 5]], np.float32),
        "labels": np.array([[1, 0], [0, 0], [1, 1]], np.float32),
    }
    return {name: column for name, column in {**columns, **changes}.items() if column is not None}


class StubTimelines:
    """The event before position p of owner u is movie u + p."""

    def cut(self, owner, end, column, length):
        assert column == "movie"
        lengths = np.minimum(end, length)
        values = owner[:, None] + end[:, None] - np.arange(length)
        return np.where(np.arange(length) < lengths[:, None], values, 0).astype(np.int32), lengths.astype(np.int32)


def packed(columns, schema=SCHEMA):
    rows = empty_rows(len(columns["labels"]), schema)
    pack(columns, schema, WHERE, rows)
    return rows


def test_slots_lengths_and_the_rest():
    got = assemble(packed(block()), np.array([2, 0]), SCHEMA, StubTimelines())
    batch = got.batch
    # Slots: movie | watched x 3 | genres x 2 | user.
    np.testing.assert_array_equal(batch.ids, [[3, 3, 0, 0, 0, 0, 2], [1, 7, 6, 0, 1, 2, 5]])
    np.testing.assert_array_equal(batch.lengths, [[1, 1], [2, 2]])
    np.testing.assert_array_equal(batch.dense, [[4, 5], [0.5, 1]])
    np.testing.assert_array_equal(batch.labels, [[1, 1], [1, 0]])
    np.testing.assert_array_equal(batch.weight, [1, 1])
    np.testing.assert_array_equal(got.group, [2, 5])
    assert got.truncated == 1  # row 0 has three genres for two slots
    assert [a.dtype for a in batch] == [np.int32, np.int32, np.float32, np.float32, np.float32]
    assert all(a.flags.c_contiguous for a in batch)
    assert got.group.dtype == np.int32


def test_weight_is_read_and_group_defaults_to_0():
    schema = dataclasses.replace(SCHEMA, features=SCHEMA.features[:1])
    rows = packed(block(weight=np.array([0.5, 2, 0]), group=None), schema)
    got = assemble(rows, np.arange(3), schema, None)
    np.testing.assert_array_equal(got.batch.weight, [0.5, 2, 0])
    np.testing.assert_array_equal(got.group, [0, 0, 0])
    assert got.batch.lengths.shape == (3, 0)


def test_no_features_and_no_dense():
    schema = Schema((), {}, (), ("click", "like"))
    got = assemble(packed(block(), schema), np.arange(3), schema, None)
    assert got.batch.ids.shape == got.batch.dense.shape == (3, 0)


def test_a_batch_shares_no_memory_with_the_rows():
    rows = packed(block())
    got = assemble(rows, np.arange(3), SCHEMA, StubTimelines())
    before = [a.copy() for a in got.batch]
    for array in rows:
        array[:] = 7
    for a, b in zip(before, got.batch, strict=True):
        np.testing.assert_array_equal(a, b)


def test_stack():
    rows = packed(block())
    whole = assemble(rows, np.arange(3), SCHEMA, StubTimelines())
    parts = [assemble(rows, np.array(i), SCHEMA, StubTimelines()) for i in ([0, 1], [2])]
    got = stack(parts)
    for a, b in zip(whole.batch, got.batch, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.group, got.group)
    assert got.truncated == whole.truncated == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"movie": np.array([1, 10, 3])},
            "data set shop, split train: feature movie holds id 10, but table movies has 10 rows, so ids must be "
            "0 <= id < 10",
        ),
        ({"movie": np.array([1, -1, 3])}, "feature movie holds id -1, but table movies has 10 rows"),
        ({"movie": np.array([1, 2**40, 3])}, "feature movie holds id 1099511627776, but table movies has 10 rows"),
        ({"genres": np.array([1, 2, 4, 0])}, "feature genres holds id 4, but table genres has 4 rows"),
        ({"movie": np.array([1.0, 2, 3])}, "feature movie has values of float64, but ids are integers"),
        ({"labels": np.array([[1, 0], [0, 0.5], [1, 1]])}, "label like holds 0.5, but must be 0 or 1"),
        ({"labels": np.array([[1, 0], [0, np.nan], [1, 1]])}, "label like holds nan, but must be 0 or 1"),
        ({"dense": np.array([[0, 1], [2, 3], [np.inf, 5]])}, "dense column age holds inf, but must be finite"),
        ({"dense": np.array([[0, 1e99], [2, 3], [4, 5]])}, "dense column price holds inf, but must be finite"),
        ({"weight": np.array([1, -1.0, 1])}, "column weight holds -1.0, but must be finite and at least 0"),
        ({"group": np.array([1, 2**40, 3])}, "column group holds 1099511627776, but must be int32"),
        ({"movie": None}, "there is no column 'movie', which feature movie needs; there are dense, genres"),
        ({"genres/lengths": None}, "there is no column 'genres/lengths', which feature genres needs"),
        ({"position": None}, "there is no column 'position', which feature watched needs"),
        ({"movie": np.array([1, 2])}, "column 'movie' has shape (2,), but must have (3,)"),
        ({"dense": np.zeros((3, 1))}, "column 'dense' has shape (3, 1), but must have (3, 2)"),
        ({"genres/lengths": np.array([3, 0, 2])}, "column 'genres' has 4 values, but its lengths, of which"),
        ({"genres/lengths": np.array([3, -1, 2])}, "column 'genres' has 4 values, but its lengths, of which"),
    ],
)
def test_bad_columns_are_one_sentence(changes, sentence):
    with pytest.raises(UserError) as error:
        packed(block(**changes))
    message = str(error.value)
    assert message.startswith(WHERE) and sentence in message and "\n" not in message


def test_two_features_may_read_one_column():
    features = (
        FeatureSpec("short", "bag", "genres", max_length=1, column="genres"),
        FeatureSpec("long", "bag", "genres", max_length=3, column="genres"),
    )
    schema = dataclasses.replace(SCHEMA, features=features)
    got = assemble(packed(block(), schema), np.arange(3), schema, None)
    np.testing.assert_array_equal(got.batch.ids, [[1, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(got.batch.lengths, [[1, 3], [0, 0], [1, 1]])
    assert got.truncated == 2


@settings(max_examples=200, deadline=None)
@given(
    bags=st.lists(st.lists(st.integers(1, 99), max_size=5), min_size=1, max_size=8),
    slots=st.integers(1, 6),
    dtype=st.sampled_from([np.int32, np.int64, np.uint16]),
)
def test_pad_equals_the_loop(bags, slots, dtype):
    values = np.array([v for bag in bags for v in bag], dtype)
    out = np.full((len(bags), slots + 2), -1, np.int32)
    pad(values, np.array([len(bag) for bag in bags], np.int32), out[:, 1:-1])
    want = [[-1, *(bag + [0] * slots)[:slots], -1] for bag in bags]
    np.testing.assert_array_equal(out, want)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bags=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=8))
def test_ragged_rows_are_selected_like_lists(data, bags):
    index = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=10))
    schema = Schema((FeatureSpec("genres", "bag", "genres", max_length=2),), {"genres": 4}, (), ("click",))
    columns = {
        "genres": np.array([v for bag in bags for v in bag], np.int32),
        "genres/lengths": np.array([len(bag) for bag in bags], np.int32),
        "labels": np.zeros((len(bags), 1)),
    }
    got = assemble(packed(columns, schema), np.array(index, np.int64), schema, None)
    assert [row[:n].tolist() for row, n in zip(got.batch.ids, got.batch.lengths[:, 0], strict=True)] == [
        bags[i][:2] for i in index
    ]
    assert got.truncated == sum(max(len(bags[i]) - 2, 0) for i in index)
