"""Which combinations of settings a test runs: a pairwise cover, or with JAXREC_FULL=1 (`make test-full`) all.

Also which engines of the embeddings there are: without the compiled library only XLA's.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

from jaxrec.embeddings.plan import ENGINES
from jaxrec.kernels.embedding_bag import library

FULL = os.environ.get("JAXREC_FULL", "") == "1"
INSTALLED_ENGINES = [e for e in ENGINES if e != "cpu" or not library.load()]


def cases(*axes: Sequence[Any]) -> list[tuple]:
    """Returns the combinations to run: one value of each axis."""
    return list(itertools.product(*axes)) if FULL else pairwise(*axes)


def pairwise(*axes: Sequence[Any]) -> list[tuple]:
    """Returns few combinations among which every two values of different axes meet.

    Greedy: each time the combination in which the most pairs meet that have not met before; the first of equals.
    """
    missing = {
        ((i, a), (j, b))
        for (i, x), (j, y) in itertools.combinations(enumerate(axes), 2)
        for a, b in itertools.product(range(len(x)), range(len(y)))
    }
    everything = list(itertools.product(*(range(len(axis)) for axis in axes)))
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(missing & _pairs(case)))
        missing -= _pairs(best)
        chosen.append(tuple(axis[k] for axis, k in zip(axes, best, strict=True)))
    return chosen


def _pairs(case: Sequence[int]) -> set:
    return set(itertools.combinations(enumerate(case), 2))
