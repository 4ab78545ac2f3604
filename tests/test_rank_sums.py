"""The external sort and its AUC against a count over all pairs, whatever the budget."""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.training.rank_sums import RankSums, group_score_key, mean_auc, score_key


def fill(sums, key, positive, negative, batch_size):
    for i in range(0, len(key), batch_size):
        sums.add(key[i : i + batch_size], positive[i : i + batch_size], negative[i : i + batch_size])


def auc_of_pairs(score, positive, negative):
    """The definition: over all pairs, by weight, a tie counting half. NaN with one class."""
    greater = (score[:, None] > score[None, :]) + 0.5 * (score[:, None] == score[None, :])
    pairs = positive.sum() * negative.sum()
    return float(positive @ greater @ negative) / pairs if pairs > 0 else float("nan")


@given(hnp.arrays(np.float32, 2, elements=st.floats(width=32, allow_nan=False)))
@settings(deadline=None)
def test_score_key_keeps_the_order(logits):
    (a, b), (key_a, key_b) = logits, score_key(logits)
    assert (a < b) == (key_a < key_b)
    assert (a == b) == (key_a == key_b)


def test_score_key_of_the_special_values():
    tiny = np.finfo(np.float32).smallest_subnormal
    ascending = np.array([-np.inf, np.finfo(np.float32).min, -1, -tiny, 0, tiny, 1, np.inf], np.float32)
    key = score_key(ascending)
    assert key.dtype == np.uint32
    assert np.all(key[1:] > key[:-1])
    assert score_key(np.array([-0.0], np.float32)) == score_key(np.array([0.0], np.float32))


def test_nan_has_no_key():
    with pytest.raises(ValueError, match=r"logits must not be NaN.* 2 of 3"):
        score_key(np.array([np.nan, 1, np.nan], np.float32))


def test_group_score_key_sorts_by_group_first():
    group = np.array([0, 0, 1, 2**31 - 1], np.int32)
    score = np.array([0, 2**32 - 1, 0, 5], np.uint32)
    key = group_score_key(group, score)
    assert key.dtype == np.uint64
    assert np.all(key[1:] > key[:-1])
    assert np.array_equal(key >> np.uint64(32), group)
    assert np.array_equal(key & np.uint64(2**32 - 1), score)


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7), st.integers(0, 7)), max_size=200),
    budget=st.integers(1, 120),
    batch_size=st.integers(1, 60),
)
@settings(deadline=None)
def test_chunks_are_the_sums_by_key_in_order(rows, budget, batch_size):
    key, positive, negative = np.array(rows, np.uint64).reshape(-1, 3).T
    expected = {k: [0.0, 0.0] for k in sorted(set(key.tolist()))}
    for k, p, n in rows:
        expected[k][0] += p
        expected[k][1] += n
    with RankSums(budget) as sums:
        fill(sums, key, positive.astype(float), negative.astype(float), batch_size)
        chunks = [c.copy() for c in sums.chunks()]
        runs = -(-len(rows) // budget)
        assert sums.spilled_rows == (max(runs, 1) - 1) * budget
        assert all(1 <= len(c) <= max(budget, 3 * runs) for c in chunks)
        again = [c.tolist() for c in sums.chunks()]
    merged = [row for c in chunks for row in c.tolist()]
    assert merged == [(k, p, n) for k, (p, n) in expected.items()]
    assert again == [c.tolist() for c in chunks]


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 2**31 - 1]),
            st.integers(0, 6),
            st.booleans(),
            st.floats(2.0**-60, 2.0**60, width=32),
        ),
        max_size=80,
    ),
    budget=st.sampled_from([1, 2, 3, 7, 30, 1000]),
)
@settings(deadline=None)
def test_mean_auc_is_the_mean_over_groups_of_the_count_over_pairs(rows, budget):
    group, score, label, weight = np.array(rows, np.float64).reshape(-1, 4).T
    positive, negative = weight * (label == 1), weight * (label == 0)
    of_groups = [auc_of_pairs(*(x[group == g] for x in (score, positive, negative))) for g in np.unique(group)]
    of_groups = [auc for auc in of_groups if not np.isnan(auc)]
    with RankSums(budget) as sums:
        fill(sums, group_score_key(group.astype(np.int32), score.astype(np.uint32)), positive, negative, 10)
        auc, groups = mean_auc(sums.chunks())
    assert groups == len(of_groups)
    assert auc == pytest.approx(np.mean(of_groups) if of_groups else np.nan, rel=1e-12, abs=1e-12, nan_ok=True)


def test_a_group_of_small_weights_after_one_of_large_weights_is_exact():
    group, score = np.array([0, 0, 1, 1, 1], np.int32), np.array([1, 2, 1, 2, 3], np.uint32)
    positive = np.array([0, 1e9, 0, 1e-20, 0])
    negative = np.array([1e9, 0, 1e-20, 0, 3e-20])
    with RankSums(100) as sums:
        sums.add(group_score_key(group, score), positive, negative)
        assert mean_auc(sums.chunks()) == (pytest.approx((1 + 0.25) / 2, abs=1e-12), 2)


def test_disjoint_runs_merge_in_chunks_of_the_budget():
    """Rows that come sorted by user, as an evaluation split may be stored: no two runs overlap."""
    key = np.arange(10_000, dtype=np.uint64)
    one = np.ones(len(key))
    with RankSums(1000) as sums:
        fill(sums, key, one, one, 128)
        lengths = [len(c) for c in sums.chunks()]
        assert np.array_equal(np.concatenate([c["key"] for c in sums.chunks()]), key)
    assert max(lengths) <= 1000
    assert len(lengths) <= 40


def _spill_and_fail(sums, key, one):
    fill(sums, key, one, one, 7)
    assert sums.spilled_rows == 90
    next(sums.chunks())
    raise RuntimeError("half way")


def test_the_spill_file_goes_when_the_sums_are_closed_also_on_error(tmp_path):
    key, one = np.arange(100, dtype=np.uint64), np.ones(100)
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    sums = RankSums(10, str(tmp_path))
    with pytest.raises(RuntimeError, match="half way"), sums:
        _spill_and_fail(sums, key, one)
    assert list(tmp_path.iterdir()) == []
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) == open_files
    with pytest.raises(ValueError, match="closed"):
        sums.chunks()


def test_a_thousand_runs_take_one_file():
    key, one = np.arange(3000, dtype=np.uint64)[::-1], np.ones(3000)
    with RankSums(1) as sums:
        fill(sums, key, one, one, 3000)
        assert sums.spilled_rows == 2999
        assert np.array_equal(np.concatenate([c["key"] for c in sums.chunks()]), key[::-1])


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(ValueError, match=f"row_budget is {budget}"):
        RankSums(budget)


def test_a_spill_dir_that_is_absent_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"spill_dir is '.*absent'"):
        RankSums(10, str(tmp_path / "absent"))


def test_memory_is_bounded_by_the_budget():
    rng = np.random.default_rng(0)
    budget, rows, batch_size = 50_000, 1_000_000, 8192
    tracemalloc.start()
    try:
        with RankSums(budget) as sums:
            for _ in range(rows // batch_size):
                key = rng.integers(0, 2**62, batch_size, dtype=np.uint64)
                sums.add(key, np.ones(batch_size), np.zeros(batch_size))
            for _ in sums.chunks():
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 130 * budget + 2**21  # the docstring's 90 bytes a row, and a batch; all rows take 480 * budget
