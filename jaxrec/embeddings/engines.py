"""What looks up and updates the rows of a device, and the choice among them."""

from __future__ import annotations

from typing import Any

from jaxrec.checks import one_of, require
from jaxrec.embeddings import cpu_engine, xla_engine
from jaxrec.embeddings.plan import Group
from jaxrec.embeddings.spec import KERNELS
from jaxrec.kernels.embedding_bag import library


def of(group: Group) -> Any:
    """Returns the module of the group's engine; all have the same functions."""
    return {"xla": xla_engine, "cpu": cpu_engine}[group.engine]


def choose(kernel: str, platform: str) -> tuple[str, str]:
    """Returns (engine, which path a run takes and why, in words).

    Args:
      kernel: `--embedding_kernel`: `compiled`, `xla`, or `auto`, which is `compiled` where it can be.
      platform: Of the devices.

    Raises:
      UserError: `compiled`, where it cannot be.
    """
    one_of("--embedding_kernel", kernel, KERNELS)
    if kernel == "xla":
        return "xla", "XLA's own operations, as --embedding_kernel=xla asks for"
    why_not = library.load() if platform == "cpu" else f"it is for CPUs, and the devices are {platform}"
    require(
        kernel == "auto" or not why_not,
        f"--embedding_kernel is 'compiled', but {why_not}; 'xla' or 'auto' runs XLA's own operations instead",
    )
    if why_not:
        return "xla", f"XLA's own operations instead of the compiled kernel: {why_not}"
    return "cpu", f"compiled kernel ({library.installed_level()})"
