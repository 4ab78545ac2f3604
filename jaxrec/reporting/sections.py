"""Passages that every report has, from its record: the machine, and the command that measured."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# Stated where they are known; the rest is in the record.
_STATED = (
    "python", "jax", "jaxlib", "flax", "torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "triton", "scikit-learn",
)  # fmt: skip


def environment(record: Mapping[str, Any]) -> str:
    """Returns a sentence without a date: CPU, cores, memory, accelerators, versions, flags, load average.

    Versions of what jaxrec is compared with come from `record["peer_versions"]` where there is such a field, else from
    the environment's; flags are `record["flags"]`, a text, a list or a mapping.
    """
    machine = record["environment"]
    parts = [f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB"]
    if machine["platform"] != "cpu":
        parts.append(f"{machine['devices']} x {machine['device']}")
    known = {**machine["versions"], **record.get("peer_versions", {})}
    said = [f"{_title(name)} {known[name]}" for name in _STATED if known.get(name, "absent") != "absent"]
    parts.append(", ".join(said))
    if flags := _flags(record.get("flags")):
        parts.append(f"flags `{flags}`")
    parts.append(f"load average before writing {record['load_average'][0]}")
    return "; ".join(parts) + "."


def command(record: Mapping[str, Any]) -> str:
    """Returns the command that measured the record, as a block of code."""
    arguments = [_quoted(a) for a in record["argv"][1:]]
    return " ".join([f"    python -m experiments.{record['study']}.run", *arguments])


def _title(name: str) -> str:
    return {"python": "Python", "torch": "PyTorch"}.get(name, name)


def _flags(flags: str | list[str] | Mapping[str, Any] | None) -> str:
    if isinstance(flags, Mapping):
        flags = [f"{name}={value}" for name, value in flags.items()]
    return flags if isinstance(flags, str) else " ".join(flags or ())


def _quoted(argument: str) -> str:
    """Quotes what a shell would split, in double quotes where those do."""
    if shlex.quote(argument) == argument:
        return argument
    return shlex.quote(argument) if set(argument) & set('"$`\\!') else f'"{argument}"'
