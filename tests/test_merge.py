"""Merging of duplicate rows, by property."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxrec.embeddings.merge import merge

N, D, ROWS = 12, 2, 6
EPS = float(np.finfo(np.float32).eps)

rows_N = hnp.arrays(np.int32, N, elements=st.integers(0, ROWS - 1))
dyadic_ND = hnp.arrays(np.float32, (N, D), elements=st.integers(-256, 256).map(lambda k: k / 32))
any_ND = hnp.arrays(np.float32, (N, D), elements=st.floats(-(2.0**40), 2.0**40, width=32))
scratch_R = hnp.arrays(np.int32, ROWS, elements=st.integers(-(2**31), 2**31 - 1))

merge = jax.jit(merge)


def by_row(rows, gradients):
    """Row -> (float64 sum, sum of absolute terms, number)."""
    return {
        int(r): (gradients[rows == r].astype(np.float64).sum(0), np.abs(gradients[rows == r]).sum(0, np.float64), n)
        for r, n in zip(*np.unique(rows, return_counts=True), strict=True)
    }


@settings(max_examples=200, deadline=None)
@given(rows_N, dyadic_ND, scratch_R)
def test_one_representative_per_row_holds_the_exact_sum(rows, gradients, scratch):
    merged = jax.device_get(merge(rows, gradients, scratch))
    expected = by_row(rows, gradients)
    assert sorted(rows[merged.first].tolist()) == sorted(expected)
    for row, gradient in zip(rows[merged.first], merged.gradient[merged.first], strict=True):
        np.testing.assert_array_equal(gradient, expected[int(row)][0])
    assert (merged.gradient[~merged.first] == 0).all()


@settings(max_examples=100, deadline=None)
@given(rows_N, any_ND, scratch_R)
def test_sums_are_within_n_eps(rows, gradients, scratch):
    merged = jax.device_get(merge(rows, gradients, scratch))
    expected = by_row(rows, gradients)
    for row, gradient in zip(rows[merged.first], merged.gradient[merged.first], strict=True):
        total, absolute, n = expected[int(row)]
        # Subnormal sums are flushed to zero by some back ends.
        assert (np.abs(gradient - total) <= n * EPS * absolute + np.finfo(np.float32).tiny * n).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(rows_N, dyadic_ND), min_size=2, max_size=4))
def test_the_scratch_of_one_call_serves_the_next(calls):
    scratch = np.zeros(ROWS, np.int32)
    for rows, gradients in calls:
        merged = merge(rows, gradients, scratch)
        scratch = merged.scratch
        fresh = merge(rows, gradients, np.zeros(ROWS, np.int32))
        np.testing.assert_array_equal(merged.first, fresh.first)
        np.testing.assert_array_equal(merged.gradient, fresh.gradient)
