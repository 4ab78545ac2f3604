"""What an embedding table is."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxrec.checks import one_of, require
from jaxrec.optim.sparse import SparseOptimizerConfig
from jaxrec.precision import PRECISIONS

SHARDINGS = ("replicated", "row", "row_cyclic", "table", "column")
# `auto` is resolved to one of them per table when the layout is planned.
CHOICES = (*SHARDINGS, "auto")
KERNELS = ("auto", "compiled", "xla")


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """One embedding table.

    Attributes:
      name: Unique.
      rows: Valid ids are 0 <= id < rows.
      dim: Columns.
      init_scale: Weights start uniform in [-init_scale, init_scale).
      optimizer: What updates its rows.
      sharding: Over the mesh's `model` axis: `replicated`; `row` (contiguous ranges of rows), `row_cyclic` (each run
        of as many rows as shards is dealt out, one row a shard, in an order that a hash of the run rotates), `table`
        (whole tables, placed for balance) or `column` (every row's columns are split).
      dtype: Of the weights: `float32`, or `bfloat16` or `float16`, to which updated rows are rounded stochastically.
        The optimizer's rows are float32.
    """

    name: str
    rows: int
    dim: int
    init_scale: float
    optimizer: SparseOptimizerConfig
    sharding: str
    dtype: str = "float32"

    def __post_init__(self):
        require(self.rows >= 1, f"table {self.name}: rows is {self.rows}, but must be at least 1")
        require(self.dim >= 1, f"table {self.name}: dim is {self.dim}, but must be at least 1")
        one_of("--embedding_sharding", self.sharding, SHARDINGS)
        one_of("--table_dtype", self.dtype, PRECISIONS)


@dataclasses.dataclass(frozen=True)
class EmbeddingConfig:
    """How a data set's tables are made.

    Attributes:
      dim: Columns of every table.
      init_scale: Weights start uniform in [-init_scale, init_scale); 0 means 1 / sqrt(rows), DLRM's choice.
      sharding: See `TableSpec`; or `auto`: by size, see `plan.choose_shardings`.
      capacity_margin: Rows that a device may send to another in a step, over the most that was measured on batches of
        the training split; a step that would need more is refused. 0: room for the worst case.
      dtype: See `TableSpec`.
      optimizer: See `TableSpec`.
      kernel: What looks up and updates rows: `compiled`, the kernel for CPUs that is built when jaxrec is installed;
        `xla`, XLA's own operations; or `auto`, the first where it is to be had.
    """

    dim: int = 16
    init_scale: float = 0.0
    sharding: str = "replicated"
    capacity_margin: float = 1.5
    dtype: str = "float32"
    optimizer: SparseOptimizerConfig = SparseOptimizerConfig()
    kernel: str = "auto"

    def __post_init__(self):
        require(self.dim >= 1, f"embedding.dim is {self.dim}, but must be at least 1")
        require(self.init_scale >= 0, f"embedding.init_scale is {self.init_scale}, but must not be negative")
        one_of("--embedding_sharding", self.sharding, CHOICES)
        one_of("--table_dtype", self.dtype, PRECISIONS)
        one_of("--embedding_kernel", self.kernel, KERNELS)
        require(
            self.init_scale <= float(jnp.finfo(self.dtype).max),
            f"embedding.init_scale is {self.init_scale}, which is beyond the largest {self.dtype}, the tables' type",
        )
        require(
            self.capacity_margin == 0 or 1 <= self.capacity_margin <= 1000,
            f"--capacity_margin is {self.capacity_margin}, but must be from 1 to 1000, or 0 for the worst case",
        )

    def table(self, name: str, rows: int, sharding: str) -> TableSpec:
        """Returns the table `name` of `rows` rows."""
        scale = self.init_scale or rows**-0.5
        return TableSpec(name, rows, self.dim, scale, self.optimizer, sharding, self.dtype)
