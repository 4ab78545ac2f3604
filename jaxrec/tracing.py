"""Capturing a profile of a range of steps. Reading one is `jaxrec.profiling`'s work."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import jax

from jaxrec.checks import UserError


def parse_steps(text: str) -> tuple[int, int] | None:
    """Parses `--profile_steps`: `a:b`, half-open; empty for none."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(f"--profile_steps is {text!r}, but must be a:b with 0 <= a < b, such as 10:15")
    return int(first), int(last)


class StepTracer:
    """Traces steps a <= step < b of a run into its workdir, and marks every step for the profile's step line."""

    def __init__(self, workdir: str, steps: tuple[int, int] | None):
        self._workdir = workdir
        self._steps = steps
        self.active = False
        self.missed = steps  # The steps asked for, until the first of them is traced.

    def __enter__(self) -> StepTracer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.active:  # By an error: the profiler is one of the process, and must not stay on.
            jax.profiler.stop_trace()
            self.active = False

    def before(self, step: int) -> None:
        """Starts the trace where `step` is the first to be traced."""
        if self._steps and not self.active and self._steps[0] <= step < self._steps[1]:
            options = jax.profiler.ProfileOptions()
            # Python's call stacks cost the most and bury the step markers and the program's operations.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._workdir, create_perfetto_trace=True, profiler_options=options)
            self.active, self.missed = True, None

    def after(self, step: int, result: object) -> str | None:
        """Ends the trace where `step` was the last; returns its folder, relative to the workdir."""
        if not self.active or step + 1 < self._steps[1]:  # pyright: ignore[reportOptionalSubscript]
            return None
        return self.stop(result)

    def stop(self, result: object) -> str | None:
        """Ends the trace, if there is one, once `result` is computed; returns its folder."""
        if not self.active:
            return None
        jax.block_until_ready(result)
        jax.profiler.stop_trace()
        self.active = False
        folder = max((Path(self._workdir) / "plugins" / "profile").iterdir(), key=os.path.getmtime)
        perfetto = folder / "perfetto_trace.json.gz"
        if perfetto.exists():
            shutil.copyfile(perfetto, Path(self._workdir) / "perfetto_trace.json.gz")
        return str(folder.relative_to(self._workdir))

    @staticmethod
    def mark(step: int) -> jax.profiler.StepTraceAnnotation:
        """Returns the context that names a step in a trace."""
        return jax.profiler.StepTraceAnnotation("train", step_num=step)
