"""What an optimizer of embedding rows is: arithmetic on the touched rows only.

Pure functions over rows that the embedding update has gathered, with one merged gradient each.
Shape suffixes: U touched rows, D dim (this device's columns).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

Rows = Mapping[str, jax.Array]


class Context(NamedTuple):
    """What an update needs besides its rows.

    Attributes:
      learning_rate: float32, the schedule's factor included.
      step: int32, steps taken before this one.
      row_mean: [U, D] -> [U], over all columns of a row, which may be spread over devices.
    """

    learning_rate: jax.Array
    step: jax.Array
    row_mean: Callable[[jax.Array], jax.Array]


Update = Callable[[jax.Array, Rows, Context], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class RowRule:
    """An optimizer of rows.

    Attributes:
      slots: Name -> whether the slot has a value per column ([rows, D]) or one per row ([rows]). All float32, and all
        start at `initial`.
      initial: The slots' first value.
      update: (gradient [U, D], slots of the rows, context) -> (what to add to the weights [U, D], new slots). A zero
        gradient must leave a row whose slots hold `initial` unchanged: the sentinel is one.
    """

    slots: Mapping[str, bool]
    initial: float
    update: Update
