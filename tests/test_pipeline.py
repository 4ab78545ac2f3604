"""Batches as a pure sequence, and reading it ahead."""

import collections
import concurrent.futures
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxrec.checks import UserError
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Dataset, FeatureSpec, Schema
from jaxrec.data.timelines import Timelines

ROWS = 103
SCHEMA = Schema(
    features=(
        FeatureSpec("row", "categorical", "rows"),
        FeatureSpec("bag", "bag", "rows", max_length=2),
    ),
    vocabulary={"rows": ROWS},
    dense=("row",),
    labels=("odd",),
)


class CountingBlocks:
    """Blocks that count how often each is read, and can be told to fail or to look like files."""

    def __init__(self, columns, block_rows, in_memory=True):
        self.inner = ArrayBlocks(columns, block_rows)
        self.rows, self.block_rows = self.inner.rows, block_rows
        self.reads = collections.Counter()
        self.fail_at = None
        self.delay = 0.0
        self.lock = threading.Lock()
        if in_memory:
            self.in_memory = True

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        with self.lock:
            self.reads[index] += 1
        time.sleep(self.delay)
        if index == self.fail_at:
            raise UserError(f"block {index} is broken")
        return self.inner[index]


def dataset(rows=ROWS, block_rows=8, in_memory=True):
    row = np.arange(rows, dtype=np.int32)
    columns = {
        "row": row,
        "bag": np.repeat(row, row % 4),
        "bag/lengths": row % 4,
        "dense": row[:, None].astype(np.float32),
        "labels": (row % 2)[:, None].astype(np.float32),
        "group": row % 7,
    }
    return Dataset("numbers", SCHEMA, {"train": CountingBlocks(columns, block_rows, in_memory)})


def make(data=None, split="train", batch_size=10, window_blocks=3, **kwargs):
    return Batches(data or dataset(), split, batch_size, window_blocks=window_blocks, **kwargs)


def rows_of(batch):
    return batch.batch.ids[:, 0].tolist()


def same(a, b):
    for x, y in zip([*a.batch, a.group], [*b.batch, b.group], strict=True):
        np.testing.assert_array_equal(x, y)
    assert a.truncated == b.truncated


def no_input_threads():
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        names = [t.name for t in threading.enumerate()]
        if not any(name.startswith(("jaxrec-input", "grain")) for name in names):
            return True
        time.sleep(0.01)
    return False


def test_an_epoch_has_every_row_once_but_the_dropped():
    batches = make()
    assert (len(batches), batches.steps_per_epoch, batches.rows_dropped_per_epoch) == (10, 10, 3)
    for epoch in range(3):
        rows = [r for k in range(10) for r in rows_of(batches[epoch * 10 + k])]
        assert len(set(rows)) == len(rows) == 100


def test_rows_stay_together():
    for batch in make():
        row = batch.batch.ids[:, 0]
        np.testing.assert_array_equal(batch.batch.dense[:, 0], row)
        np.testing.assert_array_equal(batch.batch.labels[:, 0], row % 2)
        np.testing.assert_array_equal(batch.group, row % 7)
        np.testing.assert_array_equal(batch.batch.lengths[:, 0], np.minimum(row % 4, 2))
        for slot in range(2):
            np.testing.assert_array_equal(batch.batch.ids[:, 1 + slot], np.where(row % 4 > slot, row, 0))
        np.testing.assert_array_equal(batch.batch.weight, 1)
        assert batch.truncated == np.sum(row % 4 == 3)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranges", [[(0, 10)], [(0, 5)], [(5, 10)], [(2, 4), (7, 8)], [(9, 10)]])
def test_ranges_are_those_rows_of_the_batches(shuffle, ranges):
    """103 rows: the last batch in stored order has 3, and the other 7 are padding."""
    whole, part = make(shuffle=shuffle), make(shuffle=shuffle, ranges=ranges)
    assert (len(part), part.batch_size, part.rows_dropped_per_epoch) == (len(whole), 10, whole.rows_dropped_per_epoch)
    index = np.concatenate([np.arange(a, b) for a, b in ranges])
    for k in [*range(len(whole)), 25]:
        a, b = whole[k], part[k]
        for x, y in zip([*a.batch, a.group], [*b.batch, b.group], strict=True):
            np.testing.assert_array_equal(x[index], y)
        counted = (a.batch.ids[index, 0] % 4 == 3) & (a.batch.weight[index] > 0)
        assert b.truncated == counted.sum()


def test_epochs_and_seeds_differ_and_the_same_seed_does_not():
    def epoch(seed, e):
        batches = make(seed=seed)
        return [rows_of(batches[e * 10 + k]) for k in range(10)]

    assert epoch(3, 0) == epoch(3, 0)
    assert epoch(3, 0) != epoch(3, 1)
    assert epoch(3, 0) != epoch(4, 0)
    assert epoch(3, 0)[0] != sorted(epoch(3, 0)[0])


def test_rows_are_shuffled_within_windows_of_permuted_blocks():
    batches = make(dataset(rows=96), batch_size=24, window_blocks=3)  # a batch is a window
    windows = []
    for batch in batches:
        rows = rows_of(batch)
        blocks = sorted({r // 8 for r in rows})
        assert sorted(rows) == [r for b in blocks for r in range(8 * b, 8 * b + 8)]
        assert rows != sorted(rows)
        windows.append(blocks)
    assert sorted(b for blocks in windows for b in blocks) == list(range(12))
    assert any(blocks[2] - blocks[0] > 2 for blocks in windows)


@pytest.mark.parametrize(("shuffle", "batch_size", "window_blocks"), [(True, 10, 3), (False, 10, 3), (True, 50, 1)])
def test_random_access_from_threads_equals_sequential(shuffle, batch_size, window_blocks):
    kwargs = {"shuffle": shuffle, "batch_size": batch_size, "window_blocks": window_blocks}
    fresh = make(**kwargs)
    want = [fresh[k] for k in range(35)]
    order = [k for k in range(35) for _ in range(3)]
    random.Random(0).shuffle(order)
    shared = make(**kwargs)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for k, got in zip(order, pool.map(shared.__getitem__, order), strict=True):
            same(got, want[k])
    same(make(**kwargs)[33], want[33])


def test_threads_read_each_block_of_a_window_once():
    data = dataset()
    data.splits["train"].delay = 0.02
    batches = make(data, window_blocks=13)
    barrier = threading.Barrier(4)

    def read(k):
        barrier.wait()
        return batches[k]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        begin = time.monotonic()
        list(pool.map(read, range(4)))
        seconds = time.monotonic() - begin
    assert set(data.splits["train"].reads.values()) == {1}
    assert seconds < 13 * 0.02  # the four shared the thirteen blocks


def test_evaluation_is_in_order_and_pads_with_weight_0():
    batches = make(shuffle=False)
    assert (len(batches), batches.rows_dropped_per_epoch) == (11, 0)
    got = list(batches)
    assert [r for b in got for r in rows_of(b)[: int(b.batch.weight.sum())]] == list(range(ROWS))
    last = got[-1]
    np.testing.assert_array_equal(last.batch.weight, [1] * 3 + [0] * 7)
    assert rows_of(last) == [100, 101, 102, *[102] * 7]
    np.testing.assert_array_equal(last.group, last.batch.ids[:, 0] % 7)
    assert last.truncated == 0 and sum(b.truncated for b in got) == sum(r % 4 == 3 for r in range(ROWS))
    same(batches[11], got[0])  # the next pass is the same


def test_evaluation_with_a_batch_larger_than_the_split():
    got = make(shuffle=False, batch_size=200)
    assert len(got) == 1 and got[0].batch.weight.sum() == ROWS and len(got[0].group) == 200


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        (
            {"batch_size": 104},
            "--batch_size is 104, but must be at most 103, the rows of data set numbers, split train",
        ),
        ({"batch_size": 0}, "--batch_size is 0, but must be at least 1"),
        ({"split": "valid"}, "data set numbers has no split 'valid', but train"),
        ({"seed": -1}, "--seed is -1"),
        ({"window_blocks": 0}, "window_blocks is 0"),
        ({"data": dataset(rows=0), "shuffle": False}, "data set numbers, split train: it has no rows"),
    ],
)
def test_refusals(kwargs, sentence):
    with pytest.raises(UserError) as error:
        make(**kwargs)
    assert sentence in str(error.value)


def test_negative_batches_do_not_exist():
    with pytest.raises(IndexError):
        make()[-1]


def test_histories_need_timelines():
    schema = Schema((FeatureSpec("past", "history", "rows"),), {"rows": ROWS}, ("row",), ("odd",))
    with pytest.raises(UserError, match="features past need timelines"):
        make(Dataset("numbers", schema, dataset().splits))


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(("threads", "prefetch"), [(1, 1), (2, 8), (4, 3)])
def test_streams_equal_the_sequence(in_memory, threads, prefetch):
    batches = make(dataset(in_memory=in_memory))
    assert batches.in_memory == in_memory
    want = [make()[k] for k in range(25)]
    got = list(stream(batches, 4, 25, threads=threads, prefetch=prefetch))
    assert len(got) == 21
    for a, b in zip(got, want[4:], strict=True):
        same(a, b)
    assert list(stream(batches, 5, 5)) == []
    assert no_input_threads()


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_stream_without_end_stops_early(in_memory):
    batches = make(dataset(in_memory=in_memory))
    running = stream(batches, 7)
    same(next(running), batches[7])
    same(next(running), batches[8])
    running.close()
    assert no_input_threads()
    with pytest.raises(StopIteration):
        next(running)


@pytest.mark.parametrize("in_memory", [True, False])
def test_errors_arrive_as_themselves_after_the_batches_before(in_memory):
    data = dataset(in_memory=in_memory)
    data.splits["train"].fail_at = 9
    running = stream(make(data, shuffle=False), threads=3)
    assert rows_of(next(running)) == list(range(10))
    got = 1
    with pytest.raises(UserError) as error:
        for _ in running:
            got += 1
    assert str(error.value) == "block 9 is broken"
    assert got == 7  # batch 7 is the first that needs the window of block 9
    assert no_input_threads()


def test_a_failed_window_is_read_again():
    data = dataset()
    batches = make(data, shuffle=False)
    data.splits["train"].fail_at = 1
    for _ in range(2):
        with pytest.raises(UserError, match="block 1 is broken"):
            batches[0]
    data.splits["train"].fail_at = None
    assert rows_of(batches[0]) == list(range(10))


def test_a_bad_row_is_named():
    data = dataset()
    data.splits["train"].inner._columns["row"][50] = 200
    with pytest.raises(UserError) as error:
        list(make(data))
    assert str(error.value) == (
        "data set numbers, split train: feature row holds id 200, but table rows has 103 rows, so ids must be "
        "0 <= id < 103; mend the rows that the config gives"
    )


@pytest.mark.parametrize("kwargs", [{"threads": 0}, {"prefetch": 0}])
def test_stream_options(kwargs):
    with pytest.raises(UserError, match="must be at least 1"):
        next(stream(make(), **kwargs))


SCRIPT = """
import sys
import numpy as np
from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Dataset, FeatureSpec, Schema
from jaxrec.data.timelines import Timelines
schema = Schema((FeatureSpec("row", "categorical", "rows"),), {"rows": 100}, (), ("odd",))
blocks = ArrayBlocks({"row": np.arange(100), "labels": np.zeros((100, 1))}, 8)
prefetch = DevicePrefetch(stream(Batches(Dataset("x", schema, {"train": blocks}), "train", 10)), lambda batch: batch)
next(prefetch)
print("grain" in sys.modules)
"""


def test_arrays_need_no_grain_and_an_unclosed_stream_does_not_keep_the_program():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_bad_id_in_a_timeline_is_refused_before_the_first_batch():
    schema = Schema((FeatureSpec("watched", "history", "movies", max_length=3),), {"movies": 10}, (), ("odd",))
    columns = {
        "labels": np.zeros((4, 1), np.float32), "group": np.zeros(4, np.int32), "position": np.zeros(4, np.int32)
    }  # fmt: skip
    events = Timelines(np.array([0, 3]), {"watched": np.array([1, 10, 2], np.int32)}, "few")
    with pytest.raises(UserError, match="split train: feature watched holds id 10, but table movies has 10 rows"):
        Batches(Dataset("few", schema, {"train": ArrayBlocks(columns)}, events), "train", 2)
