"""Where metrics go: `metrics.jsonl`, and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue] - generated
from tensorboardX.summary import scalar

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
        self._path = Path(workdir) / METRICS_FILE
        with self._writing():
            if self._path.exists():
                _cut(self._path, {"train": restored_step, "validation": evaluated_step})
            self._lines = self._path.open("a")
            # The suffix: files are named by the second, and a run resumed within it would empty the earlier one's.
            # Not SummaryWriter: its thread dies of a full disk, and the run would then wait for it for ever.
            self._events = EventsWriter(os.path.join(workdir, "events"), f".{time.time_ns()}")
            start = SessionLog(status=SessionLog.START)
            self._events.write_event(Event(wall_time=time.time(), step=restored_step + 1, session_log=start))
            self._events.flush()

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Writes one line and one scalar per value, named `kind/value`; values that are not finite become null.

        Raises:
          UserError: They cannot be written.
        """
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        with self._writing():
            self._lines.write(json.dumps({"step": step, "kind": kind, **clean}) + "\n")
            self._lines.flush()
            for name, value in values.items():
                summary = scalar(f"{kind}/{name}", value)
                self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            self._events.flush()

    def close(self) -> None:
        for file in (self._lines, self._events):
            # All is written but what could not be, which `write` has said.
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise UserError(
                f"{self._path}, or the TensorBoard events beside it, cannot be written ({e.strerror}): make room or "
                "mend that folder, and the same command continues from the last checkpoint"
            ) from e


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
