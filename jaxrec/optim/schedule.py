"""Learning-rate schedules: a factor of the step that multiplies every optimizer's learning rate."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrec.checks import one_of, require

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """A factor that rises linearly over `warmup_steps`, then decays over `decay_steps` to `end_factor`.

    The lengths are the schedule's own, not --steps: lengthening a run does not change the steps it has already taken.
    """

    name: str = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    end_factor: float = 0.0

    def __post_init__(self):
        one_of("schedule.name", self.name, SCHEDULES)
        require(self.warmup_steps >= 0, f"schedule.warmup_steps is {self.warmup_steps}, but must not be negative")
        require(
            self.name == "constant" or self.decay_steps >= 1,
            f"schedule.decay_steps is {self.decay_steps}, but a {self.name} schedule decays over at least 1 step",
        )


def factor(config: ScheduleConfig, step: jax.Array) -> jax.Array:
    """Returns the float32 factor for the update that takes `step` (from 0) to `step + 1`."""
    t = step.astype(jnp.float32)
    warm = jnp.minimum(1.0, (t + 1) / (config.warmup_steps + 1))
    if config.name == "constant":
        return warm
    done = jnp.clip((t - config.warmup_steps) / config.decay_steps, 0.0, 1.0)
    left = 1 - done if config.name == "linear" else 0.5 * (1 + jnp.cos(jnp.pi * done))
    return warm * (config.end_factor + (1 - config.end_factor) * left)
