"""Values and bounds in JSON schemas: read, compared, and refused where they are not exact."""

import json
import math
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]


def bounds_of(own: Schema, low: str, high: str, at: str) -> tuple[int, int | None]:
    for name in (low, high):
        value = own.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{at}.{name} must be an integer of at least 0, got {short(value)}")
    least, most = own.get(low, 0), own.get(high)
    if most is not None and most < least:
        raise ValueError(f"{at}: {low} {least} is above {high} {most}")
    return least, most


def number_bounds(kind: str, own: Schema, at: str) -> dict[str, Any]:
    """Bounds as the compiler takes them: exact ones, of the side that is narrower."""
    for name, value in own.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= 2**53:
            raise ValueError(f"{at}.{name} must be a number of at most 2**53, got {short(value)}")
        if kind == "number" and round(value, 6) != value:
            raise ValueError(f"{at}.{name}: at most six decimals are supported, got {value!r}")
    if kind == "integer":
        lows = [math.ceil(own["minimum"])] if "minimum" in own else []
        lows += [math.floor(own["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in own else []
        highs = [math.floor(own["maximum"])] if "maximum" in own else []
        highs += [math.ceil(own["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in own else []
        bounds = {"minimum": max(lows)} if lows else {}
        bounds |= {"maximum": min(highs)} if highs else {}
        if lows and highs and max(lows) > min(highs):
            raise ValueError(f"{at}: no integer lies between its bounds")
        return bounds
    lows = [(own[name], name) for name in ("minimum", "exclusiveMinimum") if name in own]
    highs = [(-own[name], name) for name in ("maximum", "exclusiveMaximum") if name in own]
    kept = [max(each)[1] for each in (lows, highs) if each]
    if len(kept) == 2:
        low, high = (own[name] for name in kept)
        if low > high or (low == high and kept != ["minimum", "maximum"]):
            raise ValueError(f"{at}: no number lies between its bounds")
    return {name: own[name] for name in kept}


def known_values(schema: Schema) -> set[str] | None:
    """All values that fit, as comparable texts, where the schema lists them."""
    if "enum" not in schema and "const" not in schema:
        return None
    values = schema.get("enum", [schema.get("const")])
    return {_canonical(value) for value in values}


def _canonical(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_canonical, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{k!r}: {_canonical(v)}' for k, v in value.items()))}}}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return repr(float(value)) if is_number else json.dumps(value)


def is_of(value: object, kind: str) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and isinstance(value, int | float) and value % 1 == 0
    if kind == "number":
        return not isinstance(value, bool) and isinstance(value, int | float)
    if kind == "null":
        return value is None
    types: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict}
    return isinstance(value, types[kind])


def check_value(value: object, at: str) -> None:
    """Refuse what is no JSON, or is not written exactly."""
    if isinstance(value, list):
        for each in value:
            check_value(each, at)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{at}: names must be strings, got {short(name)}")
            check_value(each, at)
    elif isinstance(value, int | float):
        if not math.isfinite(value) or (isinstance(value, int) and abs(value) > 2**53):
            raise ValueError(f"{at}: {short(value)} is not supported, only up to 2**53")
    elif value is not None and not isinstance(value, str):
        raise TypeError(f"{at} must hold JSON values, got {short(value)}")


def list_of(value: object, at: str, may_be_empty: bool = False) -> list[Any]:
    if not isinstance(value, list | tuple) or not (value or may_be_empty):
        raise TypeError(f"{at} must be a list that is not empty, got {short(value)}")
    return list(value)


def short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."
