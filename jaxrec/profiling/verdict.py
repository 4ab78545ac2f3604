"""What a training step waits for, in words, with the numbers that decide it."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrec.profiling.roofline import Split

# Where the next cause is closer than this to the first, both are named.
CLOSE = 0.8

VERDICTS = {
    "input": "waits for input",
    "arithmetic": "arithmetic-bound",
    "memory": "memory-bound",
    "communication": "communication-bound",
    "overhead": "overhead-bound",
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The largest part of a step's time names it.

    Attributes:
      words: One of `VERDICTS`, or two where the second is close.
      parts_ms: Cause -> ms of a step; they add up to its time with input, untraced.
      step_ms: That time.
    """

    words: str
    parts_ms: dict[str, float]
    step_ms: float

    def sentence(self) -> str:
        """Returns the verdict with its numbers."""
        order = sorted(self.parts_ms, key=lambda name: -self.parts_ms[name])
        shares = ", ".join(f"{name} {self.parts_ms[name] / self.step_ms:.0%}" for name in order)
        return f"{self.words}: of {self.step_ms:.4g} ms a step, {shares}"


def decide(fed_ms: list[float], resident_ms: list[float], split: Split) -> Verdict:
    """Decides.

    Args:
      fed_ms: Times of a step that takes its batch from the input pipeline, untraced.
      resident_ms: Times of a step on batches that are on the device already, untraced, one beside each of `fed_ms`.
        What a fed step takes longer is the input's: waits for it, and the cores that it takes from the step.
      split: Of a traced step. Tracing slows steps down, and the split's proportions are taken alone.
    """
    resident, fed = float(np.median(resident_ms)), float(np.median(fed_ms))
    fed = max(fed, resident)  # Less is noise.
    parts = {name: getattr(split, name) for name in ("communication", "overhead", "arithmetic", "memory")}
    total = sum(parts.values())
    parts_ms = {"input": fed - resident}
    parts_ms |= {name: resident * ms / total if total else 0.0 for name, ms in parts.items()}
    first, second, *_ = sorted(parts_ms, key=lambda name: -parts_ms[name])
    words = VERDICTS[first]
    if parts_ms[second] > CLOSE * parts_ms[first]:
        words += f", closely followed by {second}"
    return Verdict(words, parts_ms, fed)
