"""An implementation in a process of its own; see `experiments.workers` and `sides.Side`.

    python -m experiments.embedding_update.worker ARGUMENT

ARGUMENT is JSON: `stack`, `point` (the fields of `points.Point`) and `file`, to which rows are written for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.embedding_update.points import TABLES, Point
from experiments.embedding_update.sides import batches_of, side
from experiments.workers import serve
from jaxrec import startup

# Rows of a table that are compared: all would be gigabytes.
COMPARED = 2000


def start(argument: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., dict[str, Any]]]]:
    """Builds the implementation; returns whether freed memory is kept, and what it can be asked."""
    point = Point(**argument["point"])
    kept = startup.keep_freed_memory()
    made = side(argument["stack"], point)

    def use(setting: dict[str, Any]) -> dict[str, Any]:
        made.use(setting)
        return {}

    def rows() -> dict[str, Any]:
        # The first ones and some everywhere; the same in every process.
        chosen = np.unique(np.concatenate([np.arange(100), np.linspace(0, point.rows - 1, COMPARED).astype(int)]))
        np.savez(argument["file"], allow_pickle=False, **{name: array[chosen] for name, array in made.end().items()})
        return {}

    def ceilings() -> dict[str, Any]:
        from jaxrec.profiling import hardware

        table = TABLES * point.rows * point.dim * 4
        return {
            "random": hardware.random_rows(min(table, hardware.BYTES), point.dim, 5),
            "copy": hardware.copy(hardware.BYTES, 5),
        }

    def distinct() -> dict[str, Any]:
        config = point.config("sgd")
        batches = batches_of(config, config.data.open(""))
        per_table = [np.split(b.ids, TABLES, axis=1) for b in batches]
        return {"rows": [float(sum(len(np.unique(ids)) for ids in tables)) for tables in per_table]}

    return {"kept": kept}, {
        "settings": lambda: {"settings": made.settings()},
        "use": use,
        "run": lambda steps: {"ms": made.run(steps)},
        "forward": lambda steps: {"ms": made.forward(steps)},
        "rows": rows,
        "ceilings": ceilings,
        "distinct": distinct,
    }


if __name__ == "__main__":
    serve(start)
