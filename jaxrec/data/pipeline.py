"""Batches of a split as a random-access sequence, and reading ahead in it.

`Batches` is a pure function of its arguments: batch k is the same whoever asks for it, whatever was read before, so a
checkpoint needs nothing of the input but the number of batches consumed. `stream` reads it in order on a few threads.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxrec.checks import UserError, require
from jaxrec.data.assemble import Rows, assemble, check_ids, empty_rows, pack, stack
from jaxrec.data.schema import Blocks, Dataset, HostBatch

# What a random stream is for; with the seed and the indices it makes the stream's key.
_BLOCK_ORDER, _ROW_ORDER = 0, 1

K = TypeVar("K")
V = TypeVar("V")


def require_rows(dataset: Dataset) -> None:
    """Refuses, before a model is trained, what its evaluation would refuse.

    Raises:
      UserError: There is no validation split, or a split is empty.
    """
    has = ", ".join(dataset.splits)
    require("validation" in dataset.splits, f"data set {dataset.name} must have a split validation, but has {has}")
    for name, blocks in dataset.splits.items():
        require(blocks.rows >= 1, f"data set {dataset.name}, split {name}: it has no rows; {remedy(blocks)}")


def remedy(blocks: Blocks) -> str:
    """Returns what to do where rows are wrong."""
    folder = getattr(blocks, "folder", None)
    if folder is None:
        return "mend the rows that the config gives"
    return f"mend what {folder} was prepared from, and delete that folder so that it is prepared again"


class _Epoch(NamedTuple):
    """One pass over the split.

    Attributes:
      blocks: int64 [number of blocks], the order in which they are read.
      starts: int64 [number of windows + 1], the row (of this order) at which each window begins, and the end.
    """

    blocks: np.ndarray
    starts: np.ndarray


class Batches:
    """The batches of a split, for any k >= 0.

    Shuffled: each epoch permutes the blocks by (seed, epoch); consecutive ones form windows of `window_blocks`, whose
    rows are shuffled among themselves by (seed, epoch, window); batches are cut from the windows one after the other.
    Rows that do not fill a last batch are not used in that epoch (another epoch leaves out others).

    Not shuffled: every epoch has the rows as they are stored; the last batch is filled by repeating the last row with
    weight 0.

    Threads may read it at the same time. Two windows are held in memory (more if batches are larger).

    Attributes:
      rows: Rows of the split.
      batch_size: Rows of every batch.
      steps_per_epoch: Batches of an epoch; also `len`.
      rows_dropped_per_epoch: Rows that an epoch does not use.
      in_memory: Whether the rows come from memory (or are computed), not from files.

    With `ranges`, the batches hold these of their rows only. The order of rows does not depend on it.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: str,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        window_blocks: int = 16,
        ranges: Sequence[tuple[int, int]] | None = None,
    ):
        """Opens the split.

        Args:
          dataset: What to read.
          split: One of its splits.
          batch_size: Rows of a batch.
          seed: Key of the order; not used without `shuffle`.
          shuffle: True for training, False for evaluation.
          window_blocks: Blocks whose rows are shuffled together. Two windows are in memory at a time.
          ranges: Which rows of each batch to read, as ascending half-open ranges; None: all.

        Raises:
          UserError: No such split, an empty one, fewer rows than a shuffled batch needs, a negative seed, or an event
            whose id is outside its table.
        """
        has = ", ".join(dataset.splits)
        require(split in dataset.splits, f"data set {dataset.name} has no split {split!r}, but {has}")
        self._where = f"data set {dataset.name}, split {split}"
        self._blocks = dataset.splits[split]
        self._remedy = remedy(self._blocks)
        self.rows = self._blocks.rows
        require(batch_size >= 1, f"--batch_size is {batch_size}, but must be at least 1")
        require(window_blocks >= 1, f"window_blocks is {window_blocks}, but must be at least 1")
        require(seed >= 0, f"--seed is {seed}, but must be at least 0")
        require(self.rows >= 1, f"{self._where}: it has no rows; {self._remedy}")
        require(
            not shuffle or batch_size <= self.rows,
            f"--batch_size is {batch_size}, but must be at most {self.rows}, the rows of {self._where}",
        )
        histories = [f.name for f in dataset.schema.features if f.kind == "history"]
        require(
            not histories or dataset.timelines is not None,
            f"data set {dataset.name}: features {', '.join(histories)} need timelines, but it has none",
        )
        for f in dataset.schema.features:
            if f.kind == "history" and dataset.timelines is not None:
                with self._saying_what_to_do():
                    check_ids(dataset.timelines.column(f.source), f, dataset.schema, self._where)
        self.batch_size = batch_size
        self._ranges = [(0, batch_size)] if ranges is None else list(ranges)
        self._local_rows = sum(stop - start for start, stop in self._ranges)
        self.steps_per_epoch = self.rows // batch_size if shuffle else -(-self.rows // batch_size)
        self.rows_dropped_per_epoch = self.rows - self.steps_per_epoch * batch_size if shuffle else 0
        self.in_memory: bool = getattr(self._blocks, "in_memory", False)
        self._schema, self._timelines = dataset.schema, dataset.timelines
        self._seed, self._shuffle, self._window_blocks = seed, shuffle, window_blocks
        # Two threads on neighbouring batches need the windows under both; a batch may be larger than a window.
        self._window_rows = min(window_blocks * self._blocks.block_rows, self.rows)
        windows_per_batch = -(-batch_size // self._window_rows)
        self._windows: _Recent[tuple[int, int], _Window] = _Recent(2 * windows_per_batch)
        self._epochs: _Recent[int, _Epoch] = _Recent(2)
        # The memory of windows that are done with. Fresh memory costs more than what is written to it.
        self._room: collections.deque[Rows] = collections.deque(maxlen=2)

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[HostBatch]:
        """The first epoch."""
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, k: int) -> HostBatch:
        """Batch k, of epoch k // steps_per_epoch.

        Raises:
          UserError: The data are not what the schema says (see `assemble`).
        """
        if k < 0:
            raise IndexError(f"batch {k}: batches are numbered from 0")
        epoch, step = divmod(k, self.steps_per_epoch)
        if not self._shuffle:
            epoch = 0
        starts = self._epochs.get(epoch, self._make_epoch).starts
        begin = step * self.batch_size
        end = min(begin + self.batch_size, self.rows)
        parts: list[HostBatch] = []
        for start, stop in self._ranges:
            parts += self._read(epoch, starts, begin + start, min(begin + stop, end))
        # Where all of the rows asked for are beyond the last, that one is what is repeated.
        real = bool(parts)
        batch = stack(parts if real else [*self._read(epoch, starts, end - 1, end)])
        if len(batch.group) == self._local_rows and real:
            return batch
        return _padded(batch, self._local_rows, len(batch.group) if real else 0)

    def _read(self, epoch: int, starts: np.ndarray, begin: int, end: int) -> Iterator[HostBatch]:
        """Yields the rows begin <= row < end of an epoch's order, window by window."""
        for window in range(int(np.searchsorted(starts, begin, side="right")) - 1, len(starts) - 1):
            if starts[window] >= end or begin >= end:
                break
            # `opened` is held until its rows are copied: they are overwritten once nobody holds the window.
            opened = self._windows.get((epoch, window), self._make_window)
            rows, order = opened.open()
            index = order[max(begin - starts[window], 0) : end - starts[window]]
            with self._saying_what_to_do():
                batch = assemble(rows, index, self._schema, self._timelines)
            yield batch

    @contextlib.contextmanager
    def _saying_what_to_do(self) -> Iterator[None]:
        """Adds it to what is wrong with the rows."""
        try:
            yield
        except UserError as e:
            raise UserError(f"{e}; {self._remedy}") from e

    def _random(self, purpose: int, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence((self._seed, purpose, *key))))

    def _make_epoch(self, epoch: int) -> _Epoch:
        count = len(self._blocks)
        blocks = self._random(_BLOCK_ORDER, epoch).permutation(count) if self._shuffle else np.arange(count)
        sizes = np.full(count, self._blocks.block_rows)
        sizes[blocks == count - 1] = self.rows - (count - 1) * self._blocks.block_rows
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        return _Epoch(blocks, np.append(bounds[: -1 : self._window_blocks], bounds[-1]))

    def _make_window(self, key: tuple[int, int]) -> _Window:
        epoch, window = key
        blocks, starts = self._epochs.get(epoch, self._make_epoch)
        size = int(starts[window + 1] - starts[window])
        try:
            room = self._room.pop()
        except IndexError:
            room = empty_rows(self._window_rows, self._schema)
        rows, order = room.part(0, size), np.arange(size)

        def read(block: int, out: Rows) -> None:
            columns = self._blocks[block]
            with self._saying_what_to_do():
                pack(columns, self._schema, self._where, out)

        work: list[Callable[[], object]] = []
        if self._shuffle:
            work.append(lambda: self._random(_ROW_ORDER, epoch, window).shuffle(order))
        start = 0
        for block in blocks[window * self._window_blocks : (window + 1) * self._window_blocks].tolist():
            stop = start + min(self._blocks.block_rows, self.rows - block * self._blocks.block_rows)
            work.append(functools.partial(read, block, rows.part(start, stop)))
            start = stop
        opened = _Window(rows, order, work)
        weakref.finalize(opened, self._room.append, room).atexit = False
        return opened


class _Window:
    """The rows of a few blocks and the order in which they are dealt.

    Rows are not moved once read: each is gathered by the batch that uses it.
    """

    def __init__(self, rows: Rows, order: np.ndarray, work: list[Callable[[], object]]):
        """Takes room for the rows, their order int64 [n], and the calls, in any order, that fill both."""
        self._rows, self._order = rows, order
        self._todo = work
        self._missing = len(work)
        self._changed = threading.Condition()

    def open(self) -> tuple[Rows, np.ndarray]:
        """Returns the rows and the order, once both are filled.

        Threads that come meanwhile take a part of the work, so that it is done once and by all of them.
        """
        while self._missing:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or not self._missing)
                if not self._missing:
                    break
                call = self._todo.pop()
            try:
                call()
            except BaseException:
                # Given back: a thread that waits for it tries it, and meets the error, itself.
                with self._changed:
                    self._todo.append(call)
                    self._changed.notify_all()
                raise
            with self._changed:
                self._missing -= 1
                if not self._missing:
                    self._changed.notify_all()
        return self._rows, self._order


class _Recent(Generic[K, V]):
    """The few values last asked for, by key."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._values: collections.OrderedDict[K, V] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[K], V]) -> V:
        with self._lock:
            if key not in self._values:
                if len(self._values) == self._capacity:
                    self._values.popitem(last=False)
                self._values[key] = make(key)
            self._values.move_to_end(key)
            return self._values[key]


def _padded(batch: HostBatch, size: int, real: int) -> HostBatch:
    """Repeats the last row up to `size` rows; all but the first `real` have weight 0."""
    index = np.minimum(np.arange(size), len(batch.group) - 1)
    padded = batch.batch._replace(**{name: array.take(index, axis=0) for name, array in batch.batch._asdict().items()})
    padded.weight[real:] = 0
    return HostBatch(padded, batch.group.take(index), batch.truncated if real else 0)


def stream(
    batches: Batches, start: int = 0, stop: int | None = None, *, threads: int = 2, prefetch: int = 8
) -> Iterator[HostBatch]:
    """Reads batches in order, ahead of the reader.

    A split in files is read through Grain; one in memory by a pool of threads of its own, so that training from arrays
    needs no Grain. Closing the iterator ends the threads.

    Args:
      batches: What to read.
      start: The first batch.
      stop: One past the last; None for no end.
      threads: Threads that assemble batches.
      prefetch: Batches that are ready or being assembled at most.

    Yields:
      `batches[start]`, `batches[start + 1]`, ...

    Raises:
      UserError: As `Batches` does, in the order of the batches.
    """
    require(threads >= 1, f"the input's threads are {threads}, but must be at least 1")
    require(prefetch >= 1, f"the input's prefetch is {prefetch} batches, but must be at least 1")
    read = _stream_pool if batches.in_memory else _stream_grain
    return read(batches, start, sys.maxsize if stop is None else stop, threads, prefetch)


def _stream_pool(batches: Batches, start: int, stop: int, threads: int, prefetch: int) -> Iterator[HostBatch]:
    pool = futures.ThreadPoolExecutor(threads, thread_name_prefix="jaxrec-input")
    waiting: collections.deque[futures.Future[HostBatch]] = collections.deque()
    try:
        todo = iter(range(start, stop))
        while True:
            waiting.extend(pool.submit(batches.__getitem__, k) for k in itertools.islice(todo, prefetch - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _stream_grain(batches: Batches, start: int, stop: int, threads: int, prefetch: int) -> Iterator[HostBatch]:
    import grain  # imported late: only splits in files need it

    if start >= stop:
        return
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=prefetch)
    iterator = iter(grain.MapDataset.range(start, stop).map(batches.__getitem__).to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()
