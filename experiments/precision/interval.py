"""The uncertainty of a mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from jaxrec.checks import require

LEVEL = 0.95


def student(samples: Sequence[float]) -> tuple[float, float]:
    """Returns the two-sided `LEVEL` interval of the mean, by Student's t: mean -+ t s / sqrt(n), n - 1 degrees.

    It takes the samples for independent and normal. A bootstrap of a handful of samples would be too narrow: it knows
    no value beyond those that were drawn.

    Args:
      samples: One for each seed.

    Raises:
      UserError: There are fewer than two.
    """
    n = len(samples)
    require(n >= 2, f"--seeds is {n}, but must be at least 2: one seed has no spread")
    values = np.asarray(samples, np.float64)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * values.std(ddof=1)) / math.sqrt(n)
    return float(values.mean()) - half, float(values.mean()) + half
