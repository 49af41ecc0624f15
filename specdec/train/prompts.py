"""Prompts from a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = ("messages", "turns", "prompt", "question")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the users of one conversation say; the answers are always the target's own."""

    turns: tuple[str, ...]
    system: str | None = None

    def first_messages(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.turns[0]}]


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSON lines file, one object a line.

    Each has ``messages`` (role and content; the assistant's are left out, since the target answers
    itself), ``turns`` (strings), ``prompt`` or ``question`` (a string). Raises FileNotFoundError,
    or ValueError naming file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"--data {path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--data {path} is not a text in UTF-8 ({error.reason})") from error
    prompts = []
    # JSON allows line separators such as U+2028 within a text: only a line feed ends a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"--data {path}, line {number}: {error}") from error
    if not prompts:
        raise ValueError(f"--data {path} holds no prompts")
    return prompts


def _prompt(entry: Any) -> Prompt:
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected a JSON object, got {type(entry).__name__}")
    key = next((key for key in KEYS if entry.get(key) is not None), None)
    if key is None:
        raise ValueError(f"expected one of {', '.join(KEYS)}, got {', '.join(entry) or 'nothing'}")
    value = entry[key]
    if key in ("prompt", "question"):
        return Prompt((_text(key, value),))
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key} must be a list that is not empty")
    if key == "turns":
        return Prompt(tuple(_text("turns", turn) for turn in value))
    system, turns = None, []
    for message in value:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"messages must hold objects with role and content, got {message!r}")
        role = message["role"]
        if role == "system":
            system = _text("content", message.get("content"))
        elif role == "user":
            turns.append(_text("content", message.get("content")))
        elif role != "assistant":
            raise ValueError(f"role must be system, user or assistant, got {role!r}")
    if not turns:
        raise ValueError("messages holds nothing from the user")
    return Prompt(tuple(turns), system)


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{key} must be text that is not empty, got {value!r}")
    return value
