"""The record of a study: everything that its report says, and how it was measured. Measuring needs no rendering."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrec import environment
from jaxrec.checks import UserError, one_of

SCHEMA_VERSION = 1
CLAIMS = ("measured", "compiled, not run", "proposal")

# In an argument; a record names no absolute path.
_ABSOLUTE = re.compile(r"(?:^|(?<=[=,:]))[~/][^,]*")
_IN_MESSAGE = re.compile(r"(?<![\w.])[~/][^\s,;:'\")]+")


def row(
    name: str, stack: str, case: str, metric: str, unit: str, samples: Sequence[float], claim: str = "measured"
) -> dict[str, Any]:
    """Returns one row of a record.

    Args:
      name: What was measured.
      stack: What it was measured on: jax, pytorch-eager, scikit-learn, ...
      case: The point of the study's grid; empty where there is one.
      metric: Such as `test_auc`.
      unit: Such as `1`, `ms`, `samples/s`.
      samples: Every sample; the median is computed here.
      claim: One of `CLAIMS`.
    """
    one_of("claim", claim, CLAIMS)
    values = [float(s) for s in samples]
    return {
        "name": name, "stack": stack, "case": case, "metric": metric, "unit": unit,
        "samples": values, "median": float(np.median(values)), "claim": claim,
    }  # fmt: skip


def make(study: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> dict[str, Any]:
    """Returns a record: rows, and the argv, versions, machine and git state they were measured with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study,
        "argv": [Path(sys.argv[0]).name, *(_ABSOLUTE.sub("PATH", a) for a in sys.argv[1:])],
        "git": git_state(),
        "environment": environment.describe(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        **facts,
        "rows": list(rows),
    }


def without_paths(message: str) -> str:
    """Returns a message whose absolute paths are PATH: a record names no machine."""
    return _IN_MESSAGE.sub("PATH", message)


def write(record: Mapping[str, Any], folder: Path) -> Path:
    """Writes `record.json` into `folder`; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return path


def read(folder: Path) -> dict[str, Any]:
    """Reads `folder`'s record.

    Raises:
      UserError: It is absent, or of another schema version.
    """
    path = folder / "record.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read ({e}); --mode=measure writes it") from e
    if record.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{path} has schema_version {record.get('schema_version')}, but must have {SCHEMA_VERSION}")
    return record


def find(record: Mapping[str, Any], **where: str) -> dict[str, Any]:
    """Returns the one row whose fields equal `where`."""
    rows = [r for r in record["rows"] if all(r[k] == v for k, v in where.items())]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows match {where} in the record of {record['study']}")
    return rows[0]


def git_state() -> dict[str, Any]:
    """Returns the commit that the code is at, and whether the code differs from it."""
    root = Path(__file__).resolve().parents[2]

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--", "jaxrec", "experiments")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "not a git checkout", "modified": None}
