"""Rows of another data set, drawn once and kept in memory: for timing what is done with them, not their making."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from jaxrec.data.arrays import ArrayBlocks
from jaxrec.data.schema import DataConfig, Dataset


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A data set in memory.

    Attributes:
      data: Whose rows.
      auxiliary: Whether the auxiliary tasks' labels are kept.
    """

    data: DataConfig
    auxiliary: bool = True

    def open(self, data_dir: str) -> Dataset:
        return _drawn(self.data, self.auxiliary, data_dir)


@functools.cache
def _drawn(data: DataConfig, auxiliary: bool, data_dir: str) -> Dataset:
    dataset = data.open(data_dir)
    schema = dataset.schema if auxiliary else dataclasses.replace(dataset.schema, auxiliary=())
    splits = {}
    for name, split in dataset.splits.items():
        blocks = [split[k] for k in range(len(split))]
        columns = {c: np.concatenate([b[c] for b in blocks]) for c in blocks[0]}
        columns["labels"] = columns["labels"][:, : len(schema.tasks)]
        splits[name] = ArrayBlocks(columns, split.block_rows)
    return dataclasses.replace(dataset, schema=schema, splits=splits)
