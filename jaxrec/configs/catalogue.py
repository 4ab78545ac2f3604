"""Finding a named config: a module of this package with a function `config`.

The first line of its docstring is its help.
"""

from __future__ import annotations

import importlib
import pkgutil

from jaxrec import configs
from jaxrec.checks import require
from jaxrec.training.config import Config

_NOT_CONFIGS = ("catalogue", "overrides", "dlrm_sizes")


def names() -> list[str]:
    """Returns the named configs, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(configs.__path__) if m.name not in _NOT_CONFIGS)


def get(name: str) -> Config:
    """Returns the named config.

    Raises:
      UserError: There is none of that name.
    """
    require(name in names(), f"--config is {name!r}, but must be one of: {', '.join(names())} (or help)")
    return importlib.import_module(f"jaxrec.configs.{name}").config()


def help_lines() -> list[str]:
    """Returns a line for each config."""
    width = max(map(len, names()))
    return [
        f"{n:<{width}}  {(importlib.import_module(f'jaxrec.configs.{n}').__doc__ or '').strip().splitlines()[0]}"
        for n in names()
    ]
