"""Optimizers of the dense parameters: optax chains without a learning rate, which the step multiplies in."""

from __future__ import annotations

import dataclasses

import optax

from jaxrec.checks import one_of, require
from jaxrec.optim.adagrad import scale_by_adagrad

DENSE_OPTIMIZERS = ("adam", "adagrad", "sgd")


@dataclasses.dataclass(frozen=True)
class DenseOptimizerConfig:
    """Which optimizer trains the dense parameters.

    Attributes:
      name: `adam`, `adagrad` (PyTorch's definition) or `sgd`.
      learning_rate: Multiplied by the schedule.
      eps: Adam's and Adagrad's.
      weight_decay: Decoupled: w -= lr * weight_decay * w.
      initial_accumulator: Adagrad's.
    """

    name: str = "adam"
    learning_rate: float = 1e-3
    eps: float = 1e-8
    weight_decay: float = 0.0
    initial_accumulator: float = 0.0

    def __post_init__(self):
        one_of("optimizer.name", self.name, DENSE_OPTIMIZERS)
        for field in ("learning_rate", "eps", "weight_decay", "initial_accumulator"):
            value = getattr(self, field)
            require(value >= 0, f"optimizer.{field} is {value}, but must not be negative")


def direction(config: DenseOptimizerConfig) -> optax.GradientTransformation:
    """Returns the transformation whose output times -(learning rate) is added to the parameters."""
    if config.name == "adam":
        base = optax.scale_by_adam(eps=config.eps)
    elif config.name == "adagrad":
        base = scale_by_adagrad(config.eps, config.initial_accumulator)
    else:
        base = optax.identity()
    return optax.chain(base, optax.add_decayed_weights(config.weight_decay)) if config.weight_decay else base
