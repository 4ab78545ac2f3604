"""Which of the packages that jaxrec is compared with are installed, and in which versions."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping

from jaxrec.reporting import record as record_lib

PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu")


def imports(*, fbgemm: bool) -> str:
    """Returns the program that imports PyTorch, and FBGEMM if asked."""
    return "import torch" + ("; import fbgemm_gpu" if fbgemm else "")


def left_out(programs: Mapping[str, str]) -> dict[str, str]:
    """Runs each stack's program in a process, and returns and prints why stacks whose program fails are left out."""
    absent = {}
    for stack, code in programs.items():
        done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it ends without a word"]
            absent[stack] = record_lib.without_paths(said[-1])
            print(f"{stack}: left out ({absent[stack]}); `make baseline` installs torch and FBGEMM", flush=True)
    return absent


def versions() -> dict[str, str]:
    """Returns the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
