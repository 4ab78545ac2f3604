"""Optimizers of embedding rows, by name."""

from __future__ import annotations

import dataclasses

from jaxrec.checks import one_of, require
from jaxrec.optim import adagrad, rowwise_adagrad, sgd
from jaxrec.optim.row_rule import RowRule

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
