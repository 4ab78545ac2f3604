"""What an optimizer of embedding rows is: arithmetic on the touched rows only.

Pure functions over rows that the embedding update has gathered, with one merged gradient each.
Shape suffixes: U touched rows, D dim (this device's columns).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax

Rows = Mapping[str, jax.Array]
RowMean = Callable[[jax.Array], jax.Array]
Update = Callable[[jax.Array, Rows, jax.Array, RowMean], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class RowRule:
    """An optimizer of rows.

    Attributes:
      slots: Name -> whether the slot has a value per column ([rows, D]) or one per row ([rows]). All float32, and all
        start at `initial`.
      initial: The slots' first value.
      update: (gradient [U, D], slots of the rows, learning rate, row mean) -> (what to add to the weights [U, D], new
        slots). A zero gradient must leave a row unchanged. The row mean, [U, D] -> [U], is given, because the columns
        may be spread over devices.
    """

    slots: Mapping[str, bool]
    initial: float
    update: Update
