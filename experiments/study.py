"""The modes that every study's command has: measure a record, render its report, check that the two agree."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from jaxrec.checks import UserError, one_of
from jaxrec.reporting import record as record_lib

MODES = ("all", "measure", "render", "check", "smoke")
Record = Mapping[str, Any]


def define_flags(study: str) -> None:
    """Defines --mode and --out."""
    flags.DEFINE_string("mode", "all", "all, measure, render, check (re-rendering changes nothing) or smoke.")
    flags.DEFINE_string("out", f"reports/{study}", "Folder of record.json and report.md.")


def run(measure: Callable[[], Record], smoke: Callable[[], Record], render: Callable[[Record], str]) -> int:
    """Does what --mode asks for; returns the exit status.

    Args:
      measure: Measures in full.
      smoke: Measures as little as shows that everything works; its record and report are thrown away.
      render: The report of a record.

    Raises:
      UserError: An unknown mode, no record to render, or a report that is absent or not what its record renders to.
    """
    mode, out = flags.FLAGS.mode, Path(flags.FLAGS.out)
    one_of("--mode", mode, MODES)
    if mode == "smoke":
        with tempfile.TemporaryDirectory() as folder:
            record_lib.write(smoke(), Path(folder))
            render(record_lib.read(Path(folder)))
    if mode in ("all", "measure"):
        record_lib.write(measure(), out)
    report = out / "report.md"
    if mode in ("all", "render"):
        report.write_text(render(record_lib.read(out)))
    if mode == "check":
        rendered = render(record_lib.read(out))
        if not report.exists() or report.read_text() != rendered:
            raise UserError(f"{report} is not what {out}/record.json renders to; --mode=render writes it anew")
        print(f"{report} is what {out}/record.json renders to")
    return 0
