"""What a record says of the machine and the versions: never a host name, never a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import jax

import jaxrec

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "tensorflow-datasets")


def versions() -> dict[str, str]:
    """Returns the versions of jaxrec, Python and the packages that decide what is computed."""
    found = {"jaxrec": jaxrec.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def describe() -> dict[str, Any]:
    """Returns versions, CPU model, cores, memory and devices as JSON values."""
    devices = jax.devices()
    return {
        "versions": versions(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }


def peak_memory_bytes() -> int:
    """Returns the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cpu_model() -> str:
    """Returns the name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
