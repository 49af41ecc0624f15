"""Typed fields of a parsed config.json. Each raises ValueError naming a field that is wrong."""

from collections.abc import Mapping
from typing import Any


class UnsupportedModelError(ValueError):
    """The model needs something that this engine does not have; the message names it."""


_REQUIRED = object()


def integer(
    config: Mapping[str, Any], name: str, default: Any = _REQUIRED, *, minimum: int = 1
) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is _REQUIRED:
        raise ValueError(f"the field {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {value!r}")
    return value


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def boolean(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise ValueError(f"{name} must be a token id or a list of token ids, got {value!r}")
    return tuple(ids)
