"""Copies of whole arrays in a compiled program, read from its HLO text: what donation was to avoid."""

from __future__ import annotations

import math
import re
from typing import Any

from jaxrec.profiling.collectives import ELEMENT_BYTES

# `copy` also changes an array's layout, which costs as much.
_COPY = re.compile(r"= (\w+)\[([\d,]*)\]\S* copy\(")


def copied_bytes(compiled: Any, least_bytes: int) -> int:
    """Returns the bytes that a `jax.stages.Compiled` writes by copies of arrays of at least `least_bytes`."""
    sizes = (
        ELEMENT_BYTES[kind] * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape in _COPY.findall(compiled.as_text())
        if kind in ELEMENT_BYTES
    )
    return sum(size for size in sizes if size >= least_bytes)
