"""Where metrics go: `metrics.jsonl`, and TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import SummaryWriter

from jaxrec.checks import UserError

METRICS_FILE = "metrics.jsonl"


class MetricWriter:
    """Appends metrics to both files of a workdir.

    On a resumed run, lines past the restored step are cut from `metrics.jsonl`, and evaluations that the checkpoint
    does not know of: they come again. TensorBoard is told to ignore its events past that step.

    Raises:
      UserError: The file cannot be written.
    """

    def __init__(self, workdir: str, restored_step: int, evaluated_step: int):
        path = Path(workdir) / METRICS_FILE
        try:
            if path.exists():
                _cut(path, {"train": restored_step, "validation": evaluated_step})
            self._lines = path.open("a")
        except OSError as e:
            raise UserError(f"{path} cannot be written ({e.strerror}), but must be a file that can be") from e
        # The suffix: files are named by the second, and a run resumed within it would empty the earlier one's.
        suffix = f".{time.time_ns()}"
        self._events = SummaryWriter(
            workdir, purge_step=restored_step + 1, max_queue=1000, flush_secs=10, filename_suffix=suffix
        )

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Writes one line and one scalar per value, named `kind/value`; values that are not finite become null."""
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self._lines.write(json.dumps({"step": step, "kind": kind, **clean}) + "\n")
        self._lines.flush()
        for name, value in values.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def _cut(path: Path, last_step: Mapping[str, int]) -> None:
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            values = json.loads(line)
            if values["step"] <= last_step[values["kind"]]:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            continue  # The half line of a killed run.
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)
