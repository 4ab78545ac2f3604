"""Which rows are held out: shares, what stays together, and that nothing else decides."""

import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.data.tabular import splits
from jaxrec.data.tabular.convert import Part, Values
from jaxrec.data.tabular.parts import Made
from jaxrec.data.tabular.schema import Split


def assigned(split: Split, sizes, *, files=None, users=None, times=None):
    """The split of every row of parts of these sizes."""
    n = sum(sizes)
    users = np.arange(n, dtype=np.uint64) if users is None else np.asarray(users, np.uint64)
    bounds = np.cumsum([0, *sizes])
    made = [Made(None, files[i] if files else 0, size) for i, size in enumerate(sizes)]  # pyright: ignore
    call = splits.assign(split, made, ["train", "validation", "test"], "u", times)
    found = []
    for i, size in enumerate(sizes):
        rows = slice(bounds[i], bounds[i + 1])
        keys, codes = np.unique(users[rows], return_inverse=True)
        time = None if times is None else times[rows]
        part = Part(
            np.zeros((size, 1), np.float32), np.zeros((size, 0), np.float32), {"u": Values(keys, codes)}, time=time
        )
        found.append(call(i, part))
    return np.concatenate(found)


@pytest.mark.parametrize("by", ["order", "random", "user", "time"])
def test_shares_and_pieces(by):
    draw = np.random.default_rng(0)
    n = 20_000
    given = {"users": draw.integers(0, 2**63, 5000)[draw.integers(0, 5000, n)], "times": draw.integers(0, 10**6, n)}
    if by != "time":
        given["times"] = None
    found = assigned(Split(by, 0.2, 0.1, seed=3), [n], **given)
    shares = np.bincount(found, minlength=3) / n
    np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=0.02 if by in ("random", "user") else 1e-3)
    for sizes in ([1, n - 1], [7000, 0, 6000, 7000], [n // 40] * 40):
        np.testing.assert_array_equal(assigned(Split(by, 0.2, 0.1, seed=3), sizes, **given), found)
    other = assigned(Split(by, 0.2, 0.1, seed=4), [n], **given)
    assert (other != found).any() == (by in ("random", "user"))


def test_the_last_rows_in_order():
    assert assigned(Split("order", 0.2, 0.1), [4, 6]).tolist() == [0] * 7 + [1] * 2 + [2]


def test_equal_times_stay_together():
    times = np.array([5, 1, 9, 9, 9, 2, 3, 3, 4, 0])
    # The last tenth is a 9, and what is held out begins with the seventh of ten, 5.
    found = assigned(Split("time", 0.3, 0.1), [10], times=times)
    assert found.tolist() == [1, 0, 2, 2, 2, 0, 0, 0, 0, 0]
    for time in np.unique(times):
        assert len(np.unique(found[times == time])) == 1
    assert (np.diff(found[np.argsort(times, kind="stable")].astype(int)) >= 0).all()


def test_users_stay_together():
    users = np.repeat(np.arange(500), 7)
    found = assigned(Split("user", 0.2, 0.2), [1000, 2500], users=users).reshape(500, 7)
    assert (found == found[:, :1]).all() and len(np.unique(found)) == 3


def test_files():
    assert assigned(Split("files"), [2, 1, 3], files=[0, 1, 2]).tolist() == [0, 0, 1, 2, 2, 2]
    assert assigned(Split("last_file"), [4, 2, 3, 2], files=[0, 1, 2, 2]).tolist() == [0] * 6 + [1] * 2 + [2] * 3


def test_a_split_without_rows_is_refused():
    with pytest.raises(
        UserError, match=r"clicks: split test has no rows with split\.by = 'order' \(train 9, .* test 0\)"
    ):
        splits.check([9, 1, 0], Split(), "clicks")
    splits.check([1, 1, 1], Split(), "clicks")
