"""The parity gate in a process of its own, so that what it allocates and compiles is gone when timing begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.baselines import parity
from experiments.workers import serve
from jaxrec.configs import catalogue


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Compares a stack, with the ids and the layout of tables that it is timed with; not to agree is an error."""
    config = catalogue.get(argument["config"])
    verdict = parity.require_parity(config, argument["stack"], argument["device"], argument["ids"], argument["layout"])
    small = {
        "rows": parity.SMALL_ROWS, "batch": parity.SMALL_BATCH, "narrower": parity.NARROWER, "eps": parity.EPS,
        "ids": argument["ids"], "layout": argument["layout"],
    }  # fmt: skip
    return {**verdict.as_dict(), "small": small}, {}


if __name__ == "__main__":
    serve(start)
