"""Changing a frozen config by path, and reading one back from JSON; both check every field's type."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxrec.checks import UserError

C = TypeVar("C")


def apply(config: C, assignments: list[str]) -> C:
    """Applies `path=value` assignments, such as `model.top_mlp=512,256`, in order.

    Raises:
      UserError: An assignment without `=`, a path that is no field, or a value of another type.
    """
    for text in assignments:
        path, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set is {text!r}, but must be path=value, such as model.top_mlp=512,256")
        config = _assign(config, path.strip().split("."), value.strip(), path.strip())
    return config


def replace(config: C, path: str, value: Any) -> C:
    """Returns `config` with the field at `path` set to `value`."""
    head, _, rest = path.partition(".")
    if rest:
        value = replace(getattr(config, head), rest, value)
    return dataclasses.replace(config, **{head: value})  # pyright: ignore[reportArgumentType]


def replace_all(config: C, changes: Mapping[str, Any]) -> C:
    """Returns `config` with the field at each path of `changes` set to its value, in order."""
    for path, value in changes.items():
        config = replace(config, path, value)
    return config


def from_dict(config: C, values: Mapping[str, Any]) -> C:
    """Returns `config` with its fields taken from JSON values, as `Config.as_dict` wrote them.

    Raises:
      UserError: A field is missing, unknown or of another type: another version of jaxrec wrote them.
    """
    fields = {f.name for f in dataclasses.fields(config)}  # pyright: ignore[reportArgumentType]
    wanted = typing.get_type_hints(type(config))
    if not isinstance(values, Mapping):
        raise UserError(f"config.json has {values!r} where the fields of {type(config).__name__} must be")
    if fields != set(values):
        raise UserError(
            f"config.json has the fields {sorted(values)} where {type(config).__name__} has {sorted(fields)}: "
            "another version of jaxrec wrote it"
        )
    changes = {}
    for name, stored in values.items():
        current = getattr(config, name)
        if dataclasses.is_dataclass(current):
            changes[name] = from_dict(current, stored)
            continue
        value = tuple(stored) if isinstance(stored, list) else stored
        if not _fits(value, wanted[name]):
            raise UserError(f"config.json has {name} = {value!r}, but it must be of type {_type_name(wanted[name])}")
        changes[name] = value
    return dataclasses.replace(config, **changes)  # pyright: ignore[reportArgumentType]


def _assign(node: Any, parts: list[str], value: str, path: str) -> Any:
    fields = [f.name for f in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
    if parts[0] not in fields:
        where = ".".join(path.split(".")[: -len(parts)])
        there = f"{where} has no field {parts[0]!r}" if where else f"there is no field {parts[0]!r}"
        raise UserError(f"--set {path}: {there}; there are: {', '.join(fields) or 'none'}")
    current = getattr(node, parts[0])
    if len(parts) > 1:
        return replace(node, parts[0], _assign(current, parts[1:], value, path))
    if dataclasses.is_dataclass(current):
        inner = ", ".join(f.name for f in dataclasses.fields(current))
        raise UserError(f"--set {path}: is not a value but holds the fields {inner}")
    if parts[0] == "name" and type(node).__name__ == "Config":
        raise UserError("--set name: is set by --config")
    wanted = typing.get_type_hints(type(node))[parts[0]]
    return replace(node, parts[0], _parse(value, wanted, path))


def _parse(text: str, wanted: Any, path: str) -> Any:
    if wanted is str:
        return text
    if typing.get_origin(wanted) is tuple:
        item = typing.get_args(wanted)[0]
        return tuple(_parse(part.strip(), item, path) for part in text.split(",") if part.strip())
    if wanted is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if wanted in (int, float):
        try:
            number = wanted(text.replace("_", ""))
            if math.isfinite(number):
                return number
        except ValueError:
            pass
    if typing.get_origin(wanted) is not None and typing.get_args(wanted):
        for choice in typing.get_args(wanted):  # A union: the first type that takes the text.
            try:
                return _parse(text, choice, path)
            except UserError:
                continue
    raise UserError(f"--set {path} is {text!r}, but must be of type {_type_name(wanted)}")


def _fits(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(wanted)[0]) for v in value)
    if typing.get_origin(wanted) is not None:
        return any(_fits(value, choice) for choice in typing.get_args(wanted))
    if wanted is float and isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _type_name(wanted: Any) -> str:
    if wanted is bool:
        return "bool (true or false)"
    if wanted is float:
        return "float (a finite number)"
    if typing.get_origin(wanted) is tuple:
        return f"comma-separated list of {_type_name(typing.get_args(wanted)[0])}"
    return str(wanted) if typing.get_origin(wanted) is not None else wanted.__name__
