"""What a row holds, and the batch that is made of it.

Shape suffixes: B batch, K id slots (the sum of every feature's max_length), N dense columns, T tasks, the auxiliary
ones included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxrec.checks import one_of, require

if TYPE_CHECKING:
    from jaxrec.data.timelines import Timelines

SPLITS = ("train", "validation", "test")
KINDS = ("categorical", "bag", "history")
COMBINERS = ("sum", "mean", "none")


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """One sparse feature: which column it reads and which embedding table it looks up.

    Attributes:
      name: The feature's name; unique in a schema.
      kind: `categorical` (one id a row), `bag` (a few ids stored with the row), `history` (the last `max_length`
        events of the row's user, cut from its timeline when the batch is made, latest first).
      table: The embedding table it reads; several features may read one table.
      combiner: `sum` or `mean` of the bag's rows, or `none`: one vector per position, zeros past the bag's length.
      max_length: Id slots per row. Longer bags are truncated, and the truncated ids are counted.
      column: The block's (for `history`, the timeline's) column; the feature's name where it is empty.
    """

    name: str
    kind: str
    table: str
    combiner: str = "sum"
    max_length: int = 1
    column: str = ""

    def __post_init__(self):
        one_of(f"feature {self.name}: kind", self.kind, KINDS)
        one_of(f"feature {self.name}: combiner", self.combiner, COMBINERS)
        require(self.max_length >= 1, f"feature {self.name}: max_length is {self.max_length}, but must be at least 1")
        require(
            self.kind != "categorical" or self.max_length == 1,
            f"feature {self.name}: a categorical feature has one id a row, but max_length is {self.max_length}",
        )

    @property
    def source(self) -> str:
        return self.column or self.name


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a data set as the model sees them.

    Attributes:
      features: Sparse features, in the order of their id slots.
      vocabulary: Rows of each embedding table by name; valid ids are 0 <= id < rows.
      dense: Names of the dense columns, in order.
      labels: Names of the tasks, in order.
      auxiliary: Names of further tasks, which are trained on and not evaluated; their labels follow the others'.
    """

    features: tuple[FeatureSpec, ...]
    vocabulary: Mapping[str, int]
    dense: tuple[str, ...]
    labels: tuple[str, ...]
    auxiliary: tuple[str, ...] = ()

    def __post_init__(self):
        names = [f.name for f in self.features]
        require(len(set(names)) == len(names), f"feature names must be unique, got {names}")
        for f in self.features:
            require(f.table in self.vocabulary, f"feature {f.name} reads table {f.table!r}, which has no row count")

    @property
    def bags(self) -> tuple[FeatureSpec, ...]:
        """The features whose length varies, in the order of `Batch.lengths`' columns."""
        return tuple(f for f in self.features if f.kind != "categorical")

    @property
    def tasks(self) -> tuple[str, ...]:
        """The columns of `Batch.labels`."""
        return self.labels + self.auxiliary

    @property
    def slots(self) -> int:
        """K, the width of `Batch.ids`."""
        return sum(f.max_length for f in self.features)


class Batch(NamedTuple):
    """What goes to the device: five arrays.

    Attributes:
      ids: int32 [B, K]. Each feature's slots in the schema's order; slots past a bag's length hold 0.
      lengths: int32 [B, len(schema.bags)].
      dense: float32 [B, N].
      labels: float32 [B, T].
      weight: float32 [B]; 0 marks a row that only pads the last batch.
    """

    # numpy arrays on the host, jax arrays in a step; this layer does not know jax.
    ids: Any
    lengths: Any
    dense: Any
    labels: Any
    weight: Any


class HostBatch(NamedTuple):
    """A batch, and what the host keeps of it: the device needs neither.

    Attributes:
      batch: The five arrays.
      group: int32 [B], the group (user) of each row, for per-user metrics.
      truncated: Ids of bags that did not fit their features' slots, in the rows of weight that count.
    """

    batch: Batch
    group: np.ndarray
    truncated: int = 0


# A block: `rows` rows, columnar. Fixed columns are [n] or [n, d]; a bag column `c` is its flat values under `c` and
# int32 counts [n] under `c/lengths`. Reserved names: `dense` [n, N] float32, `labels` [n, T] float32, `weight` [n]
# float32 (absent: 1), `group` [n] int32, `timestamp` [n] int64, `position` [n] int32 (events of the group's timeline
# that the row may see).
Block = Mapping[str, np.ndarray]


class Blocks(Protocol):
    """A split: blocks by index. Every block holds `block_rows` rows but the last, which holds the rest."""

    rows: int
    block_rows: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Block: ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An opened data set.

    Attributes:
      name: For messages.
      schema: Its columns.
      splits: `train`, `validation`, `test`.
      timelines: The users' events, where the schema has `history` features.
      best_ne: For planted data, split -> the NE of the planted probabilities on that split's rows, where it is known.
      unseen: Of held-out splits, feature -> ids that training has no row for.
      digest: Of rows that are stored; empty where they follow from the config.
    """

    name: str
    schema: Schema
    splits: Mapping[str, Blocks]
    timelines: Timelines | None = None
    best_ne: Callable[[str], float | None] | None = None
    unseen: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    digest: str = ""


class DataConfig(Protocol):
    """What a config's `data` field is: a frozen dataclass that opens (and prepares, where absent) its data set."""

    def open(self, data_dir: str) -> Dataset: ...
