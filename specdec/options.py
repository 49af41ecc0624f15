"""Values of command-line options that several commands have."""

import json
from typing import Any


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """The value of an option that takes JSON. Raises ValueError where it is no object."""
    if text is None:
        return None
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{option} must be a JSON object, not {text}")
    return values


def sizes(option: str, text: str | None) -> list[int] | None:
    """Numbers with commas between them. Raises ValueError for anything else."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}")
    return [int(part) for part in parts]
