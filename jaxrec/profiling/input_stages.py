"""The rates of the input pipeline, stage by stage and together.

Each stage is run alone on what the stage before it left in memory, as often as fills the time given, on one thread;
last comes the pipeline as training runs it, with its threads, up to batches on the device and a step that does nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrec.data.assemble import assemble, empty_rows, pack
from jaxrec.data.blocks import FileBlocks
from jaxrec.data.device import DevicePrefetch
from jaxrec.data.pipeline import Batches, stream
from jaxrec.data.schema import Batch, Blocks, Dataset

STAGES = ("read", "decode", "shuffle", "batch", "transfer", "together")
# Blocks that the stages before `batch` work on in turn: the window that training shuffles.
WINDOW_BLOCKS = 16


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage's rate.

    Attributes:
      name: One of `STAGES`.
      what: What it does, in words.
      rows_per_second: Every sample.
    """

    name: str
    what: str
    rows_per_second: list[float]

    @property
    def median(self) -> float:
        """Rows per second."""
        return float(np.median(self.rows_per_second))


def measure(
    dataset: Dataset,
    batch_size: int,
    put: Callable[[Batch], Any],
    *,
    threads: int = 2,
    samples: int = 5,
    seconds: float = 1.0,
) -> list[Stage]:
    """Times every stage on the training split.

    Args:
      dataset: What is read.
      batch_size: Rows of a batch.
      put: Takes a batch to the device.
      threads: Of the pipeline, for `together`.
      samples: Of each stage; one more, which warms up, is dropped.
      seconds: Of a sample, at least.

    Returns:
      The stages that the split has, in order: one in memory is read, or computed, block by block and not decoded.
    """
    blocks = dataset.splits["train"]
    schema, where = dataset.schema, f"data set {dataset.name}, split train"
    count = min(WINDOW_BLOCKS, len(blocks))
    stages = []

    def timed(name: str, what: str, once: Callable[[], int]) -> None:
        """`once` does a part of the work and returns the rows of it."""
        rates = []
        for _ in range(samples + 1):
            rows, begin = 0, time.perf_counter()
            while (spent := time.perf_counter() - begin) < seconds or not rows:
                rows += once()
            rates.append(rows / spent)
        stages.append(Stage(name, what, rates[1:]))

    turn = iter(_forever(len(blocks)))
    if isinstance(blocks, FileBlocks):
        records = [blocks.record(i) for i in range(count)]

        def read() -> int:
            i = next(turn)
            blocks.record(i)
            return _rows(blocks, i)

        def decode() -> int:
            i = next(turn) % count
            blocks.decode(i, records[i])
            return _rows(blocks, i)

        timed("read", "records of blocks from files, unpacked", read)
        timed("decode", "records to columns", decode)
    else:

        def draw() -> int:
            i = next(turn)
            return len(blocks[i]["labels"])

        timed("read", "blocks from memory, or computed", draw)
    window = [blocks[i] for i in range(count)]
    sizes = [_rows(blocks, i) for i in range(count)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    rows = empty_rows(int(starts[-1]), schema)
    order = np.arange(starts[-1])
    rng = np.random.default_rng(0)

    def shuffle() -> int:
        for i, block in enumerate(window):
            pack(block, schema, where, rows.part(int(starts[i]), int(starts[i + 1])))
        rng.shuffle(order)
        return len(order)

    timed("shuffle", "columns checked and packed to rows, a window's order drawn", shuffle)
    size = min(batch_size, len(order))
    cuts = iter(_forever(max(len(order) // size, 1)))

    def batch() -> int:
        k = next(cuts)
        assemble(rows, order[k * size : (k + 1) * size], schema, dataset.timelines)
        return size

    timed("batch", "rows gathered, histories cut" if schema_has_histories(dataset) else "rows gathered", batch)
    ready = [
        assemble(rows, order[k * size : (k + 1) * size], schema, dataset.timelines).batch
        for k in range(min(8, max(len(order) // size, 1)))
    ]
    chosen = iter(_forever(len(ready)))

    def transfer() -> int:
        jax.block_until_ready(put(ready[next(chosen)]))
        return size

    timed("transfer", "batches to the device", transfer)
    batches = Batches(dataset, "train", batch_size)
    with DevicePrefetch(stream(batches, threads=threads), put) as ahead:

        def together() -> int:
            device, _ = next(ahead)
            jax.block_until_ready(device)
            return batch_size

        timed("together", f"all of it, ahead of a step that does nothing, on {threads} threads", together)
    return stages


def schema_has_histories(dataset: Dataset) -> bool:
    """Whether a batch has histories to cut."""
    return any(f.kind == "history" for f in dataset.schema.features)


def _forever(count: int) -> Iterator[int]:
    while True:
        yield from range(count)


def _rows(blocks: Blocks, index: int) -> int:
    return min(blocks.block_rows, blocks.rows - index * blocks.block_rows)
