"""Keys, and vocabularies counted exactly however little memory they have."""

import collections
import random

import numpy as np
import plain_preparation
import pyarrow as pa
import pytest

from jaxrec.checks import UserError
from jaxrec.data.tabular.vocabulary import Counts, Vocabulary, hashed, keys_of, merged, mixed

ALPHABET = "a0\0 \u00e9\u4e2d\U0001f600"


@pytest.fixture(scope="module")
def texts():
    draw = random.Random(0)
    of_all_lengths = ["".join(draw.choices(ALPHABET[:3], k=n)) for n in range(301)]
    return of_all_lengths + ["".join(draw.choices(ALPHABET, k=draw.randrange(20))) for _ in range(300)]


def test_keys_are_those_of_a_scalar_reference(texts):
    assert keys_of(pa.array(texts)).tolist() == [plain_preparation.key_of(text) for text in texts]
    assert keys_of(pa.array([], pa.string())).tolist() == []
    assert keys_of(pa.array(["", ""])).tolist() == [plain_preparation.key_of("")] * 2


@pytest.mark.parametrize(("start", "count"), [(0, 1), (1, 0), (7, 13), (250, 60), (300, 301), (601, 0)])
def test_keys_of_slices(texts, start, count):
    keys = keys_of(pa.array(texts).slice(start, count))
    assert keys.tolist() == [plain_preparation.key_of(text) for text in texts[start : start + count]]


def test_short_values_of_equal_length_never_share_a_key():
    two = [a + b for a in map(chr, range(128)) for b in map(chr, range(128))]
    assert len(np.unique(keys_of(pa.array(two)))) == 128**2
    draw = random.Random(1)
    eight = list({"".join(draw.choices("01234567", k=8)) for _ in range(20_000)})
    assert len(np.unique(keys_of(pa.array(eight)))) == len(eight)
    keys = np.array([draw.getrandbits(64) & 2**64 - 2**i for i in range(64) for _ in range(20)], np.uint64)
    assert len(np.unique(mixed(keys))) == len(np.unique(keys))


def test_hashed_ids_are_rows():
    keys = keys_of(pa.array([str(i) for i in range(10_000)]))
    for rows in (2, 7, 2**31 - 1):
        ids = hashed(keys, rows)
        assert ids.dtype == np.int32 and ids.tolist() == [int(k) % rows for k in keys.tolist()]
    counts = np.bincount(hashed(keys, 10), minlength=10)
    assert counts.min() > 880, "uniform: the deviation is 30"


def fill(counts: Counts, batches) -> collections.Counter:
    """Adds batches; returns what must have been counted."""
    wanted = collections.Counter()
    for keys, times in batches:
        counts.add(np.array(keys, np.uint64), np.array(times, np.int64))
        for key, n in zip(keys, times, strict=True):
            wanted[key] += n
    return wanted


def batches_of(distinct: int, seed: int):
    draw = random.Random(seed)
    pool = [draw.randrange(2**64) for _ in range(distinct)] + [0, 2**64 - 1, 2**63]
    for _ in range(60):
        keys = draw.choices(pool, k=draw.randrange(1, 40))
        yield keys, [draw.randrange(1, 9) for _ in keys]


@pytest.mark.parametrize("room", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize("distinct", [3, 500])
def test_counts_are_exact_in_any_room(tmp_path, room, distinct):
    counts = Counts(tmp_path, "c", room)
    wanted = fill(counts, batches_of(distinct, room))
    found = {}
    last = -1
    for keys, times in counts.parts():
        assert len(keys) <= 6 * room + 20, "a range fits in memory"
        for key, n in zip(keys.tolist(), times.tolist(), strict=True):
            assert key > last
            found[key], last = n, key
    assert found == wanted
    assert bool(list(tmp_path.iterdir())) == (len(wanted) > 2 * room)


@pytest.mark.parametrize("room", [3, 10_000])
@pytest.mark.parametrize(("min_count", "most"), [(1, 1000), (1, 5), (10, 1000), (30, 7), (10**9, 5)])
def test_vocabularies_are_the_most_frequent(tmp_path, room, min_count, most):
    counts = Counts(tmp_path, "c", room)
    wanted = fill(counts, batches_of(200, 0))
    # Of equals the smaller key comes first.
    often = sorted((k for k, n in wanted.items() if n >= min_count), key=lambda k: (-wanted[k], k))[:most]
    vocabulary = counts.vocabulary(min_count, most)
    assert vocabulary.rows == len(often) + 1
    ids = {key: i + 1 for i, key in enumerate(often)}
    asked = [*wanted, 1, 2, 3]
    assert vocabulary.look_up(np.array(asked, np.uint64)).tolist() == [ids.get(key, 0) for key in asked]
    assert vocabulary.look_up(np.array([], np.uint64)).tolist() == []


def test_ties_are_broken_by_key_whatever_spills(tmp_path):
    keys = list(range(100, 0, -1))
    found = []
    for room in (2, 1000):
        counts = Counts(tmp_path, f"c{room}", room)
        fill(counts, [([key], [1]) for key in keys])
        found.append(counts.vocabulary(1, 10).keys.tolist())
    assert found == [list(range(1, 11))] * 2


def test_nothing_counted(tmp_path):
    counts = Counts(tmp_path, "c", 4)
    vocabulary = counts.vocabulary(1, 10)
    assert vocabulary.rows == 1 and vocabulary.look_up(np.array([5], np.uint64)).tolist() == [0]
    assert isinstance(vocabulary, Vocabulary) and [len(a) for a in merged([])] == [0, 0]


def test_memory_holds_no_more_than_its_room(tmp_path):
    """Whatever is counted: beyond twice the room, what is pending is merged or written."""
    counts = Counts(tmp_path, "c", 50)
    for i in range(200):
        keys = np.arange(i * 20, i * 20 + 20, dtype=np.uint64)
        counts.add(keys, np.ones(20, np.int64))
        assert sum(len(k) for k, _ in counts._pending) <= 2 * 50
    assert sum(len(k) for k, _ in counts.parts()) == 4000
    assert len(list(tmp_path.glob("c-*-keys.npy"))) > 30


def test_a_full_disk_ends_in_a_sentence(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    counts = Counts(tmp_path / "parts", "c", 2)
    with pytest.raises(UserError, match=rf"--data_dir is '{tmp_path}', whose disk has no room left"):
        for i in range(10):
            counts.add(np.array([i], np.uint64), np.array([1]))
