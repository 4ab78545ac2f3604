"""Optimizers of embedding rows, by name."""

from __future__ import annotations

import dataclasses

from jaxrec.checks import one_of, require
from jaxrec.optim import adagrad, adam, rowwise_adagrad, sgd
from jaxrec.optim.row_rule import RowRule

SPARSE_OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adam", "momentum", "sgd")


@dataclasses.dataclass(frozen=True)
class SparseOptimizerConfig:
    """Which optimizer trains the embedding rows.

    Attributes:
      name: `rowwise_adagrad`, `adagrad` (element-wise), `adam` (row-lazy), `momentum` (SGD with momentum on the touched
        rows) or `sgd`.
      learning_rate: Multiplied by the schedule.
      eps: Adagrad's and Adam's; outside the root.
      initial_accumulator: Adagrad's.
      b1: Adam's decay of the first moment, and the decay of `momentum`.
      b2: Adam's decay of the second moment.
      weight_decay: Decoupled, on the touched rows: w -= lr * weight_decay * w.
    """

    name: str = "rowwise_adagrad"
    learning_rate: float = 0.02
    eps: float = 1e-8
    initial_accumulator: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0

    def __post_init__(self):
        one_of("embedding.optimizer.name", self.name, SPARSE_OPTIMIZERS)
        for field in ("learning_rate", "eps", "initial_accumulator", "weight_decay"):
            value = getattr(self, field)
            require(value >= 0, f"embedding.optimizer.{field} is {value}, but must not be negative")
        for field in ("b1", "b2"):
            value = getattr(self, field)
            require(0 < value < 1, f"embedding.optimizer.{field} is {value}, but must be above 0 and below 1")


def row_rule(config: SparseOptimizerConfig) -> RowRule:
    """Returns the rule that `config` names."""
    if config.name == "rowwise_adagrad":
        return RowRule({"accumulator": False}, config.initial_accumulator, rowwise_adagrad.update(config.eps))
    if config.name == "adagrad":
        return RowRule({"accumulator": True}, config.initial_accumulator, adagrad.update_rows(config.eps))
    if config.name == "adam":
        return RowRule({"first": True, "second": True}, 0.0, adam.update_rows(config.b1, config.b2, config.eps))
    if config.name == "momentum":
        return RowRule({"momentum": True}, 0.0, sgd.update_rows_with_momentum(config.b1))
    return RowRule({}, 0.0, sgd.update_rows)
