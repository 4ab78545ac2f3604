"""The one way in which bad input ends: a sentence for the user, exit status 2."""

from __future__ import annotations

import importlib
from typing import Any


class UserError(Exception):
    """Input that the user can mend.

    The message is one sentence that names the flag or file, the value given and what would be accepted. Commands print
    it without a stack trace and exit with status 2; libraries only raise it.
    """


def require(condition: bool, message: str) -> None:
    """Raises `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)


def one_of(what: str, value: object, accepted: tuple[str, ...]) -> None:
    """Raises `UserError` unless `value` is one of `accepted`; `what` names the flag or field."""
    require(value in accepted, f"{what} is {value!r}, but must be one of: {', '.join(accepted)}")


def import_package(module: str, purpose: str, install: str) -> Any:
    """Imports what not every installation has.

    Args:
      module: Its name.
      purpose: What needs it, such as `reading data needs the package x`.
      install: What pip is to install.

    Raises:
      UserError: It is absent.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"{purpose}: pip install {install}") from e
