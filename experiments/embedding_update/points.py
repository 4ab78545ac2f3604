"""The points at which tables are looked up and updated: what a step asks of them, without a model around it."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.drawn import Drawn
from jaxrec.checks import UserError, require
from jaxrec.configs import catalogue, overrides
from jaxrec.training.config import Config

TABLES, ROWS = 8, 100_000
LAWS = ("uniform", "zipf")
# dim x bag x batch: from single narrow ids in a large batch to long bags and wide rows.
GRID = ("64x8x2048", "16x1x16384", "16x8x4096", "32x1x4096", "64x1x8192", "64x64x512", "128x8x2048", "256x1x2048")
# Batches that are held in memory; the rows of one are no longer in a cache when its turn comes again.
BATCHES = 8


@dataclasses.dataclass(frozen=True)
class Point:
    """One shape and law.

    Attributes:
      dim: Columns of a row.
      bag: Ids of a table in a row of the batch; they are summed.
      batch: Rows.
      law: Of the ids: `uniform`, or `zipf` with exponent 1.2, ranks permuted over the rows.
      rows: Of each table.
    """

    dim: int
    bag: int
    batch: int
    law: str
    rows: int = ROWS

    @property
    def shape(self) -> str:
        return f"{self.dim}x{self.bag}x{self.batch}"

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.law}"

    def config(self, optimizer: str) -> Config:
        """Returns the config whose tables and batches these are; its model is not used."""
        changes: dict[str, Any] = {
            "data.tables": TABLES, "data.rows": self.rows, "data.bag": self.bag, "data.ids": self.law,
            "data.exponent": 1.2, "data.train_rows": BATCHES * self.batch, "data.validation_rows": 1,
            "data.test_rows": 1, "data.dense": 1, "embedding.dim": self.dim, "training.batch_size": self.batch,
            "embedding.optimizer.name": optimizer,
            # With next to none, a first step of Adagrad is as long for a rounding error as for a gradient.
            "embedding.optimizer.eps": 1e-3,
        }  # fmt: skip
        config = overrides.replace_all(catalogue.get("dlrm_embedding_bound"), changes)
        return dataclasses.replace(config, data=Drawn(config.data, auxiliary=False))


def parse(text: str, law: str, rows: int = ROWS) -> Point:
    """Returns the point of `DIMxBAGxBATCH`.

    Raises:
      UserError: It is none.
    """
    numbers = text.split("x")
    wrong = f"--points has {text!r}, but a point is dim x bag x batch, such as {GRID[0]}"
    require(len(numbers) == 3 and all(n.isdecimal() and int(n) >= 1 for n in numbers), wrong)
    dim, bag, batch = map(int, numbers)
    if dim % 4:
        raise UserError(f"--points has {text!r}, but FBGEMM's rows are a multiple of 4 wide")
    return Point(dim, bag, batch, law, rows)
