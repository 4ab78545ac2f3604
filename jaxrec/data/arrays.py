"""A split whose rows are arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from jaxrec.data.schema import Block


class ArrayBlocks:
    """Serves arrays as `schema.Blocks`; needs neither files nor Grain.

    Attributes:
      rows: Rows in all.
      block_rows: Rows of every block but the last.
      in_memory: Says to `pipeline.stream` that Grain is not needed to read it.
    """

    in_memory = True

    def __init__(self, columns: Mapping[str, np.ndarray], block_rows: int = 8192):
        """Takes the columns of all rows, named and shaped as in `schema.Block`.

        Args:
          columns: Fixed columns [n] or [n, d]; a bag column `c` as flat values under `c` and counts [n] under
            `c/lengths`. They are not copied.
          block_rows: Rows of a block.

        Raises:
          ValueError: The columns do not have the same number of rows.
        """
        if block_rows < 1:
            raise ValueError(f"block_rows is {block_rows}, but must be at least 1")
        self._columns = {name: np.asarray(column) for name, column in columns.items()}
        # A bag's flat values are cut at its rows' bounds, every other column at the rows themselves.
        self._bounds = {
            name: np.concatenate([[0], np.cumsum(self._columns[f"{name}/lengths"], dtype=np.int64)])
            for name in self._columns
            if f"{name}/lengths" in self._columns
        }
        counts = {name: len(column) for name, column in self._columns.items() if name not in self._bounds}
        if len(set(counts.values())) != 1:
            raise ValueError(f"the columns must have the same number of rows, but have {counts}")
        for name, bounds in self._bounds.items():
            if bounds[-1] != len(self._columns[name]):
                raise ValueError(
                    f"the lengths of column {name} sum to {bounds[-1]}, but it has {len(self._columns[name])} values"
                )
        self.rows = next(iter(counts.values()))
        self.block_rows = block_rows

    def __len__(self) -> int:
        return (self.rows + self.block_rows - 1) // self.block_rows

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start, stop = index * self.block_rows, min((index + 1) * self.block_rows, self.rows)
        return {
            name: column[self._bounds[name][start] : self._bounds[name][stop]]
            if name in self._bounds
            else column[start:stop]
            for name, column in self._columns.items()
        }
