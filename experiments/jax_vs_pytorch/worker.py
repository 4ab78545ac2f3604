"""A side in a process of its own; see `experiments.workers` and `sides.Side`.

    python -m experiments.jax_vs_pytorch.worker CASE

CASE is JSON: the fields of `sides.Case`, `given` (as `sides.TorchSide` has it), and `cache`, the folder of JAX's
compile cache or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from experiments.jax_vs_pytorch.sides import Case, side
from experiments.workers import serve
from jaxrec import environment, startup


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Builds the side; returns how long that took, and what it can be asked."""
    given, cache = argument.pop("given"), argument.pop("cache")
    case = Case(**argument)
    if case.stack == "jax":
        startup.keep_freed_memory()
        startup.enable_compile_cache(cache)
    imported = startup.seconds_since_process_start()
    begin = time.perf_counter()
    made = side(case, given=given)
    built = time.perf_counter() - begin

    def use(setting: dict[str, Any]) -> dict[str, Any]:
        made.use(setting)
        return {}

    can: dict[str, Callable[..., dict[str, Any]]] = {
        "first_step": made.first_step,
        "settings": lambda: {"settings": made.settings()},
        "use": use,
        "resident": lambda steps: {"ms": made.resident(steps)},
        "fed": lambda steps: {"ms": made.fed(steps)},
        "train": lambda first, end: {"seconds": made.train(first, end)},
        "evaluate": lambda: {"ne": made.evaluate()},
        "profile": made.profile,
        "memory": lambda: {"peak_bytes": environment.peak_memory_bytes()},
    }
    return {"imported": imported, "built": built}, can


if __name__ == "__main__":
    serve(start)
