"""Users' events, stored once; a row's history is cut from them when its batch is made.

Shape suffixes: U owners, E events, n rows, L length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxrec.checks import UserError, require


@dataclasses.dataclass(frozen=True, eq=False)
class Timelines:
    """The events of every owner, one owner after the other, each in the order of time.

    Attributes:
      offsets: int64 [U + 1]; owner u has the events `offsets[u]` to `offsets[u + 1]`.
      columns: Of the events, [E] each.
      name: The data set's, for messages.
    """

    offsets: np.ndarray
    columns: Mapping[str, np.ndarray]
    name: str = "timelines"

    def __post_init__(self):
        offsets = self.offsets
        if (
            offsets.dtype != np.int64
            or offsets.ndim != 1
            or not len(offsets)
            or offsets[0]
            or np.any(np.diff(offsets) < 0)
        ):
            raise ValueError(f"offsets must be int64 [U + 1], from 0 upward, got {offsets.dtype} {offsets.shape}")
        for column, values in self.columns.items():
            if values.shape != (offsets[-1],):
                raise ValueError(f"column {column} must have shape ({offsets[-1]},) as offsets say, got {values.shape}")

    @property
    def owners(self) -> int:
        """U."""
        return len(self.offsets) - 1

    @property
    def events(self) -> int:
        """E."""
        return int(self.offsets[-1])

    def column(self, name: str) -> np.ndarray:
        """Returns a column of the events, [E].

        Raises:
          UserError: There is no such column.
        """
        if name not in self.columns:
            has = ", ".join(sorted(self.columns))
            raise UserError(f"data set {self.name}: the timelines have no column {name!r}; there are {has}")
        return self.columns[name]

    def cut(self, owner: np.ndarray, end: np.ndarray, column: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Cuts each row's last events before a position.

        Args:
          owner: int [n], the row's owner.
          end: int [n]; the row sees events 0 to end - 1 of its owner.
          column: Which of the events' columns.
          length: L, the events of a row at most.

        Returns:
          values: int32 [n, L], latest first, 0 past a row's events.
          lengths: int32 [n], min(end, L).

        Raises:
          UserError: There is no such column or it does not hold int32, no such owner, or fewer events than `end`.
        """
        values = self.column(column)
        require(
            np.can_cast(values.dtype, np.int32),
            f"data set {self.name}: the timelines' column {column!r} holds {values.dtype}, but ids must be int32",
        )
        owner, end = np.asarray(owner), np.asarray(end)
        bad = (owner < 0) | (owner >= self.owners)
        if bad.any():
            raise UserError(
                f"data set {self.name}: column 'group' holds {owner[bad][0]}, but there are timelines of {self.owners} "
                f"owners, so it must be 0 <= group < {self.owners}"
            )
        start = self.offsets.take(owner)
        has = self.offsets.take(owner + 1) - start
        bad = (end < 0) | (end > has)
        if bad.any():
            raise UserError(
                f"data set {self.name}: column 'position' holds {end[bad][0]}, but the timeline of group "
                f"{owner[bad][0]} has {has[bad][0]} events, so it must be 0 <= position <= {has[bad][0]}"
            )
        lengths = np.minimum(end, length).astype(np.int32)
        latest = start + end - 1
        if self.events >= length:
            # Row i of this view is values[i], values[i - 1], ...: a history is a row, and is copied as one.
            last = length - 1
            step = values.strides[0]
            backward = np.lib.stride_tricks.as_strided(
                values[last:], (len(values) - last, length), (step, -step), writeable=False
            )
            cut = backward[np.maximum(latest - last, 0)]
        else:
            cut = np.zeros((len(owner), length), values.dtype)
        # The first events of all have fewer before them than the view is wide.
        first = np.flatnonzero((latest < length - 1) & (end > 0))
        slot = np.arange(length)
        if len(first):
            cut[first] = values.take(latest[first, None] - slot, mode="clip")
        # A slot past a row's first event has read whatever lies there.
        short = np.flatnonzero(lengths < length)
        cut[short] *= slot < lengths[short, None]
        return cut.astype(np.int32, copy=False), lengths
