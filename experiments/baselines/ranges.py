"""Names for a profiler: which region of the step an operation belongs to."""

from __future__ import annotations

import contextlib

import torch

from jaxrec.profiling.regions import REGIONS


def region(name: str) -> contextlib.AbstractContextManager[object]:
    """Returns a context whose operations a profiler, where one is on, shows inside a range called `name`.

    With no profiler it is a flag's worth of work, 1 us. Inside `torch.compile` it is nothing: compiled kernels have no
    ranges, and are told apart by `compiled_kernels`.
    """
    # First, as the compiler would guard on the flag and compile anew under a profiler.
    if torch.compiler.is_compiling() or not torch.autograd.profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    assert name in REGIONS, name
    return torch.profiler.record_function(name)
