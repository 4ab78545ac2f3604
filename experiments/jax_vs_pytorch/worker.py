"""A side in a process of its own; see `experiments.workers` and `sides.Side`.

    python -m experiments.jax_vs_pytorch.worker CASE

CASE is JSON: the fields of `sides.Case`, `given` (as `sides.TorchSide` has it), `keep` (whether freed memory is kept),
and `cache`, the folder of JAX's compile cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.jax_vs_pytorch.sides import Case, side
from experiments.workers import serve
from jaxrec import environment, startup


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Builds the side; returns whether freed memory is kept, and what it can be asked."""
    given, cache, keep = (argument.pop(name) for name in ("given", "cache", "keep"))
    case = Case(**argument)
    kept = keep and startup.keep_freed_memory()
    startup.enable_compile_cache(cache)  # PyTorch's first weights are made by JAX, too.
    made = side(case, given=given)

    def use(setting: dict[str, Any]) -> dict[str, Any]:
        made.use(setting)
        return {}

    return {"kept": kept}, {
        "compile": lambda: {"seconds": made.compile()},
        "settings": lambda: {"settings": made.settings()},
        "use": use,
        "resident": lambda steps: {"ms": made.resident(steps)},
        "fed": lambda steps: {"ms": made.fed(steps)},
        "put": lambda batches: {"ms": made.put(batches)},
        "train": lambda first, end: {"seconds": made.train(first, end)},
        "evaluate": lambda: {"ne": made.evaluate()},
        "profile": made.profile,
        "peak": lambda: {"bytes": _peak_bytes()},
    }


def _peak_bytes() -> int:
    """Returns the largest resident size of this process; unlike getrusage's, its parent's is no part of it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return environment.peak_memory_bytes()


if __name__ == "__main__":
    serve(start)
