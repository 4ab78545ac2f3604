"""Exact, weighted AUC of any number of rows in bounded memory, by an external merge sort.

A row is a sort key and the weight it adds to the positives or to the negatives. Rows are buffered up to a budget; a
full buffer is sorted, its equal keys are summed, and it is appended to a temporary file as a run. Reading merges the
runs, one range of keys at a time; a key is never split between two ranges, so ties are counted exactly.

    key = group << 32 | score      score: the float32 logit, mapped to a uint32 of the same order

so that one sort serves the AUC of every group, and the AUC of all rows when every group is 0.

Shape suffixes: B batch, K unique keys of a chunk, G groups of a chunk, R runs, S sampled keys.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype([("key", np.uint64), ("positive", np.float64), ("negative", np.float64)])
Records = NDArray[np.void]  # of dtype RECORD

# Keys that a merge holds at once, unless the budget is smaller: 24 MiB, large enough that numpy's loops dominate.
_CHUNK = 1 << 20


def score_key(logits_B: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Maps float32 to uint32 so that a < b, a == b in the one exactly when in the other.

    The bits of a non-negative float are already ordered: set the sign bit to put them above the negative ones, whose
    order is reversed: invert all bits. -0.0 is made 0.0 first, as the two are equal.

    Args:
      logits_B: float32 [B]; infinities are allowed.

    Returns:
      uint32 [B].

    Raises:
      ValueError: If a logit is NaN, which has no rank.
    """
    nans = int(np.isnan(logits_B).sum())
    if nans:
        raise ValueError(f"logits must not be NaN, which has no rank, but {nans} of {len(logits_B)} are")
    bits_B = np.where(logits_B == 0, np.float32(0), logits_B).astype(np.float32, copy=False).view(np.uint32)
    return np.where(bits_B >> 31 == 1, ~bits_B, bits_B | np.uint32(1 << 31))


def group_score_key(group_B: NDArray[np.integer[Any]], score_B: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """The key that sorts by group, then by score: uint64 [B] of group (0 <= group < 2^32) and `score_key`, both [B]."""
    return group_B.astype(np.uint64) << np.uint64(32) | score_B


@final
class RankSums:
    """Positive and negative weight by key, in the order of the keys, in bounded memory.

    The memory peaks at about 90 bytes for each row of the budget, while a full buffer is sorted, and does not grow with
    the number of rows; a process's resident size also shows the pages of the file being merged, which the operating
    system drops when it needs them. The spill file has no name: it goes when it is closed, or with the process, however
    that ends.

        with RankSums(row_budget=4_000_000) as sums:
            for key, positive, negative in rows:
                sums.add(key, positive, negative)
            auc, groups = mean_auc(sums.chunks())

    Attributes:
      spilled_rows: Rows written to disk so far; 0 while all of them fit into the budget.
    """

    def __init__(self, row_budget: int, spill_dir: str | None = None):
        """Allocates the buffer; the spill file is opened when the buffer is first full.

        Args:
          row_budget: Rows held in memory; at least 1.
          spill_dir: An existing folder for the spill file, of 24 bytes a row; None: the system's temporary folder. If
            that is in memory itself (tmpfs), name one on a disk.

        Raises:
          ValueError: If the budget is below 1, or `spill_dir` is not a folder.
        """
        if row_budget < 1:
            raise ValueError(f"row_budget is {row_budget}, but must be at least 1")
        if spill_dir is not None and not os.path.isdir(spill_dir):
            raise ValueError(f"spill_dir is {spill_dir!r}, which is not a folder: name one that exists, or None")
        self.spilled_rows = 0
        self._buffer: Records = np.empty(row_budget, RECORD)  # pages that are never written take no memory
        self._filled = 0
        self._chunk = min(row_budget, _CHUNK)
        self._spill_dir = spill_dir
        self._file: IO[bytes] | None = None
        self._ends = [0]  # of the runs in the file, in records

    def add(
        self, key_B: NDArray[np.uint64], positive_B: NDArray[np.floating[Any]], negative_B: NDArray[np.floating[Any]]
    ) -> None:
        """Adds rows: uint64 keys and their finite, non-negative weights, each [B], with any number of equal keys."""
        taken = 0
        while taken < len(key_B):
            if self._filled == len(self._buffer):
                self._spill()
            count = min(len(key_B) - taken, len(self._buffer) - self._filled)
            rows = self._buffer[self._filled : self._filled + count]
            rows["key"] = key_B[taken : taken + count]
            rows["positive"] = positive_B[taken : taken + count]
            rows["negative"] = negative_B[taken : taken + count]
            self._filled += count
            taken += count

    def chunks(self) -> Iterator[Records]:
        """All that was added, as RECORD arrays [K], K >= 1: keys strictly increasing, within chunks and across them."""
        runs: list[Records] = [_sum_by_key(self._buffer[: self._filled])] if self._filled else []
        if self._file is not None:
            self._file.flush()
            spilled = np.memmap(self._file, RECORD, "r")
            runs += [spilled[a:b] for a, b in zip(self._ends[:-1], self._ends[1:], strict=True)]
        return _merge(runs, self._chunk)

    def close(self) -> None:
        """Removes the spill file. Nothing can be read afterwards."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spill(self) -> None:
        """Appends the buffer to the file as one run, and empties it."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._spill_dir)  # noqa: SIM115 (close does)
        run = _sum_by_key(self._buffer[: self._filled])
        self._file.write(run.data)
        self._ends.append(self._ends[-1] + len(run))
        self.spilled_rows += self._filled
        self._filled = 0


def _sum_by_key(rows: Records) -> Records:
    """Sorts at least one row by key and sums the weights of equal keys: RECORD [B] -> RECORD [K]."""
    order_B = np.argsort(rows["key"], kind="stable")
    key_B = rows["key"][order_B]
    start_K = np.flatnonzero(np.concatenate(([True], key_B[1:] != key_B[:-1])))
    sums = np.empty(len(start_K), RECORD)
    sums["key"] = key_B[start_K]
    sums["positive"] = np.add.reduceat(rows["positive"][order_B], start_K)
    sums["negative"] = np.add.reduceat(rows["negative"][order_B], start_K)
    return sums


def _merge(runs: list[Records], chunk: int) -> Iterator[Records]:
    """Merges R runs, each of strictly increasing keys, into chunks of at most max(chunk, 3 R) records.

    With every s-th key of each run sampled, and every R-th sampled key (of all, sorted) a boundary, the keys between
    two boundaries hold at most 2 R samples: R, and as many equal to the lower boundary as other runs have. A run with n
    samples there has fewer than (n + 1) s keys there, all runs together 3 R s.
    """
    stride = max(1, chunk // (3 * max(1, len(runs))))
    sampled_S = np.sort(np.concatenate([run["key"][::stride] for run in runs])) if runs else np.empty(0, np.uint64)
    bounds = np.unique(sampled_S[len(runs) :: len(runs)]) if runs else sampled_S
    # Where each run is cut: [R] rows of len(bounds) + 2 positions, from 0 to the run's length.
    cuts = [np.concatenate(([0], np.searchsorted(run["key"], bounds), [len(run)])) for run in runs]
    for i in range(len(bounds) + 1):
        parts = [run[cut[i] : cut[i + 1]] for run, cut in zip(runs, cuts, strict=True) if cut[i] < cut[i + 1]]
        if len(parts) == 1:
            yield parts[0]
        elif parts:
            yield _sum_by_key(np.concatenate(parts))


class _Pairs(NamedTuple):
    """Per group, each float64 [G]: weight of positives, of negatives, of the pairs that the scores order rightly."""

    positive: NDArray[np.float64]
    negative: NDArray[np.float64]
    concordant: NDArray[np.float64]


def mean_auc(chunks: Iterable[Records]) -> tuple[float, int]:
    """The unweighted mean, over the groups that have both classes, of each group's weighted AUC.

    For a group with positive weight p_k and negative weight n_k at its k-th distinct score, in increasing order,

        AUC = sum_k p_k (sum_{j<k} n_j + n_k / 2) / (sum_k p_k  sum_k n_k)

    the probability that a positive row, drawn by weight, scores above a negative one, a tie counting half (Hanley and
    McNeil 1982, "The Meaning and Use of the Area under a Receiver Operating Characteristic (ROC) Curve"; scikit-learn's
    `roc_auc_score(sample_weight=...)`).

    Args:
      chunks: RECORD arrays [K] as from `RankSums.chunks`, with `group_score_key` keys; a group may span chunks.

    Returns:
      The mean (NaN where no group has both classes), and the number of groups that have both classes.
    """
    total, groups = 0.0, 0
    zero = np.zeros(1)
    group, carry = -1, _Pairs(zero, zero, zero)  # the group that is still open at the chunk's end
    for records in chunks:
        group_G, pairs = _pairs_by_group(records)
        if int(group_G[0]) == group:  # it goes on: all of its scores so far are below the rest
            pairs.concordant[0] += carry.concordant[0] + carry.negative[0] * pairs.positive[0]
            pairs.positive[0] += carry.positive[0]
            pairs.negative[0] += carry.negative[0]
            closed = [_Pairs(*(x[:-1] for x in pairs))]
        else:
            closed = [carry, _Pairs(*(x[:-1] for x in pairs))]
        for done in closed:
            auc, count = _sum_of_auc(done)
            total, groups = total + auc, groups + count
        group, carry = int(group_G[-1]), _Pairs(*(x[-1:] for x in pairs))
    auc, count = _sum_of_auc(carry)
    total, groups = total + auc, groups + count
    return (total / groups if groups else float("nan")), groups


def _pairs_by_group(records: Records) -> tuple[NDArray[np.uint64], _Pairs]:
    """The groups of a chunk [K], as group [G] and `_Pairs` [G] of the chunk's part of each."""
    group_K = records["key"] >> np.uint64(32)
    start_G = np.flatnonzero(np.concatenate(([True], group_K[1:] != group_K[:-1])))
    positive_K, negative_K = records["positive"], records["negative"]
    below_K = _cumsum_by_group(negative_K, start_G) - negative_K / 2
    return group_K[start_G], _Pairs(
        np.add.reduceat(positive_K, start_G),
        np.add.reduceat(negative_K, start_G),
        np.add.reduceat(positive_K * below_K, start_G),
    )


def _cumsum_by_group(x_K: NDArray[np.float64], start_G: NDArray[np.intp]) -> NDArray[np.float64]:
    """The inclusive cumulative sum of float64 [K] that begins anew at each index of start_G.

    Not a cumulative sum over all groups less its value at each start: that cancels, and loses a group whose weights are
    small beside those before it. By doubling: after the step of width w an element holds the sum of the last 2 w.
    """
    if len(start_G) == 1:
        return np.cumsum(x_K)
    sum_K = x_K.copy()
    position_K = np.arange(len(x_K)) - np.repeat(start_G, np.diff(start_G, append=len(x_K)))
    width, live = 1, np.flatnonzero(position_K >= 1)
    while len(live):
        sum_K[live] += sum_K[live - width]  # the right side is read before it is written
        width *= 2
        live = live[position_K[live] >= width]
    return sum_K


def _sum_of_auc(pairs: _Pairs) -> tuple[float, int]:
    """The sum of the AUC of the groups that have both classes, and their number."""
    both = (pairs.positive > 0) & (pairs.negative > 0)
    auc = pairs.concordant[both] / (pairs.positive[both] * pairs.negative[both])
    return float(auc.sum()), int(both.sum())
