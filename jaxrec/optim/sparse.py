"""Optimizers of embedding rows: arithmetic on the touched rows only.

A `RowRule` is a pair of pure functions over rows that the embedding update has gathered, with one merged gradient each.
Shape suffixes: U touched rows, D dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax

from jaxrec.checks import one_of, require
from jaxrec.optim import adagrad, rowwise_adagrad, sgd

Rows = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class RowRule:
    """An optimizer of rows.

    Attributes:
      slots: Name -> whether the slot has a value per column ([rows, D]) or one per row ([rows]). All float32, and all
        start at `initial`.
      initial: The slots' first value.
      update: (gradient [U, D], slots of the rows, learning rate) -> (what to add to the weights [U, D], new slots).
        A zero gradient must leave a row unchanged.
    """

    slots: Mapping[str, bool]
    initial: float
    update: Callable[[jax.Array, Rows, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


SPARSE_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd")


@dataclasses.dataclass(frozen=True)
class SparseOptimizerConfig:
    """Which optimizer trains the embedding rows.

    Attributes:
      name: `rowwise_adagrad`, `adagrad` (element-wise) or `sgd`.
      learning_rate: Multiplied by the schedule.
      eps: Adagrad's; outside the root.
      initial_accumulator: Adagrad's.
    """

    name: str = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float = 1e-8
    initial_accumulator: float = 0.0

    def __post_init__(self):
        one_of("embedding.optimizer.name", self.name, SPARSE_OPTIMIZERS)
        for field in ("learning_rate", "eps", "initial_accumulator"):
            value = getattr(self, field)
            require(value >= 0, f"embedding.optimizer.{field} is {value}, but must not be negative")


def row_rule(config: SparseOptimizerConfig) -> RowRule:
    """Returns the rule that `config` names."""
    if config.name == "rowwise_adagrad":
        return RowRule({"accumulator": False}, config.initial_accumulator, rowwise_adagrad.update(config.eps))
    if config.name == "adagrad":
        return RowRule({"accumulator": True}, config.initial_accumulator, adagrad.update_rows(config.eps))
    return RowRule({}, 0.0, sgd.update_rows)
