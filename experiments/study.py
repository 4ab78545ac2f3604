"""The modes that every study's command has: measure a record, render its report, check that the two agree."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import finished as finished_lib
from jaxrec.checks import UserError, one_of
from jaxrec.reporting import page
from jaxrec.reporting import record as record_lib

MODES = ("all", "measure", "render", "check", "smoke")
Record = Mapping[str, Any]
Render = Callable[[Record], str]
Figures = Callable[[Record], Mapping[str, str]]

_PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+\.svg)\)")


def define_flags(study: str) -> None:
    """Defines --mode and --out."""
    flags.DEFINE_string("mode", "all", "all, measure, render, check (re-rendering changes nothing) or smoke.")
    flags.DEFINE_string(
        "out",
        f"reports/{study}",
        "Folder of record.json and what it renders to; smoke writes only to one that is given.",
    )


def run(
    measure: Callable[[], Record], smoke: Callable[[], Record], render: Render, figures: Figures | None = None
) -> int:
    """Does what --mode asks for; returns the exit status.

    Args:
      measure: Measures in full.
      smoke: Measures as little as shows that everything works; its record and report are thrown away unless --out is
        given.
      render: The report of a record.
      figures: The report's pictures, file name -> SVG.

    Raises:
      UserError: An unknown mode, no record to render, or a report that is absent or not what its record renders to.
    """
    mode, out = flags.FLAGS.mode, Path(flags.FLAGS.out)
    one_of("--mode", mode, MODES)
    if mode == "smoke":
        with tempfile.TemporaryDirectory() as folder:
            kept = out if flags.FLAGS["out"].present else Path(folder)
            record_lib.write(smoke(), kept)
            write(outputs(kept, render, figures), kept)
            check(outputs(kept, render, figures), kept)
    if mode in ("all", "measure"):
        record_lib.write(measure(), out)
        finished_lib.remove(out)
    if mode in ("all", "render"):
        write(outputs(out, render, figures), out)
    if mode == "check":
        check(outputs(out, render, figures), out)
        print(f"what is in {out} is what {out}/record.json renders to")
    return 0


def finished() -> finished_lib.Finished:
    """Returns the pieces that this command's measurement has finished; smoke keeps none."""
    folder = None if flags.FLAGS.mode == "smoke" else Path(flags.FLAGS.out)
    return finished_lib.Finished(folder, finished_lib.key())


def outputs(folder: Path, render: Render, figures: Figures | None) -> dict[str, str]:
    """Returns all that a folder's record renders to, file name -> text: report.md, its pictures, report.html."""
    record = record_lib.read(folder)
    report, pictures = render(record), dict(figures(record)) if figures is not None else {}
    if set(_PICTURE.findall(report)) != set(pictures):
        raise ValueError(f"the report shows {set(_PICTURE.findall(report))}, but its figures are {set(pictures)}")
    title = next(line for line in report.splitlines() if line.startswith("# ")).removeprefix("# ")
    return {"report.md": report, **pictures, "report.html": page.html(report, pictures, title, folder)}


def write(texts: Mapping[str, str], folder: Path) -> None:
    """Writes a folder's files, and removes the pictures of an earlier report."""
    for path in left_over(texts, folder):
        path.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def check(texts: Mapping[str, str], folder: Path) -> None:
    """Raises `UserError` unless a folder's files are these, to the byte."""
    for name, text in texts.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != text.encode():
            raise UserError(f"{path} is not what its record renders to; --mode=render writes it anew")
    for path in left_over(texts, folder):
        raise UserError(f"{path} is of no report; --mode=render removes it")


def left_over(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Returns the pictures in a folder that are not among its files."""
    return sorted(path for path in folder.glob("*.svg") if path.name not in texts)
