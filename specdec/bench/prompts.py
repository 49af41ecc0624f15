"""Prompt files: JSON lines in the format of Spec-Bench, ``{"id", "category", "turns"}``."""

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The first turn of one question."""

    id: str
    category: str
    text: str


def load_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Read a prompt file; None reads the one shipped with the package.

    Only the first of a question's ``turns`` is taken: a later one would depend on the model's
    own answer. ``question_id`` is read too, for the files of MT-bench. Raises FileNotFoundError
    naming the file, and ValueError naming file, line and field.
    """
    if path is None:
        text = files("specdec.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
        name = "the prompt file of the package"
    else:
        if not Path(path).is_file():
            raise FileNotFoundError(f"prompts: no such file: {path}")
        name = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"prompts: {name} is not a text in UTF-8 ({error.reason})") from error
    prompts = [
        _parse(line, f"prompts: {name}, line {number}")
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"prompts: {name} holds no prompt")
    return prompts


def _parse(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object with id, category and turns")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str) or not turns[0]:
        raise ValueError(f"{where}: turns must be a list whose first entry is a text")
    identifier = row.get("id", row.get("question_id", where))
    return Prompt(id=str(identifier), category=str(row.get("category") or "all"), text=turns[0])


def prompts_digest(prompts: list[Prompt]) -> str:
    """A short name for these prompts, whatever file they came from."""
    rows = [(prompt.category, prompt.text) for prompt in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def spread(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """``count`` prompts taken from the categories in turn, so that few stand for all."""
    if count is None or count >= len(prompts):
        return prompts
    if count < 1:
        raise ValueError(f"num_prompts must be at least 1, got {count}")
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    rounds = max(len(group) for group in by_category.values())
    taken = [
        group[round_]
        for round_ in range(rounds)
        for group in by_category.values()
        if round_ < len(group)
    ]
    return taken[:count]


def of_length(texts: list[list[int]], length: int) -> list[list[int]]:
    """Prompts of exactly ``length`` tokens: all texts one after another, from each one on."""
    joined = [token for text in texts for token in text]
    starts = [sum(len(text) for text in texts[:number]) for number in range(len(texts))]
    return [[joined[(start + i) % len(joined)] for i in range(length)] for start in starts]
