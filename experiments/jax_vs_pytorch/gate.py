"""The parity gate in a process of its own, so that what it allocates and compiles is gone when timing begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.baselines.parity import require_parity
from experiments.workers import serve
from jaxrec.configs import catalogue


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Compares; returns the verdict, which is that they agree."""
    config = catalogue.get(argument["config"])
    verdict = require_parity(config, argument["stack"], argument["device"], layout=argument["layout"])
    return verdict.as_dict(), {}


if __name__ == "__main__":
    serve(start)
