"""Arrays as a split."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jaxrec.data.arrays import ArrayBlocks


@settings(max_examples=100, deadline=None)
@given(bags=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=12), block_rows=st.integers(1, 5))
def test_blocks_hold_every_row_once(bags, block_rows):
    blocks = ArrayBlocks(
        {
            "labels": np.arange(len(bags), dtype=np.float32)[:, None],
            "bag": np.array([v for bag in bags for v in bag], np.int32),
            "bag/lengths": np.array([len(bag) for bag in bags], np.int32),
        },
        block_rows,
    )
    assert blocks.rows == len(bags) and len(blocks) == -(-len(bags) // block_rows)
    got = [blocks[i] for i in range(len(blocks))]
    assert all(len(b["labels"]) == block_rows for b in got[:-1])
    rows = [v for b in got for v in b["labels"][:, 0].tolist()]
    assert rows == list(range(len(bags)))
    for b in got:
        parts = np.split(b["bag"], np.cumsum(b["bag/lengths"])[:-1])
        assert [p.tolist() for p in parts] == [bags[int(row)] for row in b["labels"][:, 0]]


def test_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="the same number of rows"):
        ArrayBlocks({"labels": np.zeros((3, 1)), "group": np.zeros(2)})
    with pytest.raises(ValueError, match="lengths of column bag sum to 3, but it has 2 values"):
        ArrayBlocks({"bag": np.zeros(2), "bag/lengths": np.array([1, 2])})
    with pytest.raises(ValueError, match="block_rows is 0"):
        ArrayBlocks({"labels": np.zeros((3, 1))}, 0)
    blocks = ArrayBlocks({"labels": np.zeros((3, 1))}, 2)
    for index in (2, -1):
        with pytest.raises(IndexError):
            blocks[index]
