"""Pieces of a long measurement that are finished, kept so that an interrupted one goes on where it was.

    finished = study.finished()
    for case in CASES:
        samples = finished.get(case, lambda: measure_case(case))

What a piece measured must be JSON (lists, numbers, texts, mappings), and its name must be its own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrec import environment
from jaxrec.reporting import record as record_lib

FILE = "unfinished.jsonl"
_ROOT = Path(__file__).parents[1]
# They change what is measured.
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GLIBC_TUNABLES", "LD_PRELOAD")


def key() -> dict[str, Any]:
    """Returns what must be the same for a piece to be used: flags but --mode, commit, sources, versions, machine."""
    sources = hashlib.sha256()
    for path in sorted(p for folder in ("jaxrec", "experiments") for p in (_ROOT / folder).rglob("*.py")):
        sources.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    packages = {f"{d.name}=={d.version}" for d in importlib.metadata.distributions()}
    return {
        "argv": [a for a in sys.argv[1:] if not a.startswith("--mode")],
        "commit": record_lib.git_state()["commit"],
        "sources": sources.hexdigest(),
        "python": platform.python_version(),
        "packages": hashlib.sha256("\n".join(sorted(packages)).encode()).hexdigest(),
        "machine": [environment.cpu_model(), os.cpu_count(), *(f"{n}={os.environ.get(n, '')}" for n in _VARIABLES)],
    }


class Finished:
    """The finished pieces of a measurement: a line of a file each, the first line being the key.

    Pieces of another key are thrown away. A last line that is incomplete, as after a kill, is too.
    """

    def __init__(self, folder: Path | None, key: Mapping[str, Any]):
        """Reads what is kept in a folder; with None nothing is read or kept."""
        self._path = None if folder is None else folder / FILE
        self._kept: dict[str, Any] = {}
        self._asked: set[str] = set()
        if self._path is None:
            return
        lines = _whole_lines(self._path)
        if lines[:1] == [json.loads(json.dumps(key))]:
            self._kept = {line["name"]: line["value"] for line in lines[1:]}
        elif len(lines) > 1:
            changed = [name for name in key if not isinstance(lines[0], dict) or lines[0].get(name) != key[name]]
            print(f"discarding  {len(lines) - 1} pieces of another run: {', '.join(changed)} changed since")
        if self._kept:
            print(f"reusing     {len(self._kept)} pieces that an interrupted run had finished: {'; '.join(self._kept)}")
        # Written anew: nothing is ever appended to half a line.
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        kept = [{"name": name, "value": value} for name, value in self._kept.items()]
        new.write_text("".join(json.dumps(line) + "\n" for line in (key, *kept)))
        new.replace(self._path)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns what a piece measured, now or before the interruption; as JSON reads it back, in both cases.

        Raises:
          ValueError: The name was asked for before.
        """
        if name in self._asked:
            raise ValueError(f"two pieces of one measurement are called {name!r}")
        self._asked.add(name)
        if name not in self._kept:
            line = json.dumps({"name": name, "value": measure()}, allow_nan=False)
            self._kept[name] = json.loads(line)["value"]
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(line + "\n")
                    file.flush()
                    os.fsync(file.fileno())
        return self._kept[name]


def remove(folder: Path) -> None:
    """Removes what is kept in a folder: the record holds it now."""
    (folder / FILE).unlink(missing_ok=True)


def _whole_lines(path: Path) -> list[Any]:
    """Returns the lines from the first on that were written to their end."""
    lines = []
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            lines.append(json.loads(line))
    except (FileNotFoundError, ValueError):
        pass
    return lines
