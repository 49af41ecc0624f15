"""Files of prompts: what is read, and what is refused with its line."""

import json
from pathlib import Path

import pytest

from specdec.train.prompts import Prompt, read_prompts


def write(path: Path, *entries: object) -> Path:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_every_kind_of_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "One."},
        {"question": "Two?", "answer": "not the target's"},
        "",
        {"id": 3, "turns": ["Three.", "Four."]},
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Five."},
                {"role": "assistant", "content": "not the target's"},
                {"role": "user", "content": "Six."},
            ]
        },
    )
    assert read_prompts(path) == [
        Prompt(("One.",)),
        Prompt(("Two?",)),
        Prompt(("Three.", "Four.")),
        Prompt(("Five.", "Six."), system="Be kind."),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[1]", "JSON object, got list"),
        ({"text": "x"}, "expected one of messages, turns, prompt, question, got text"),
        ({"prompt": " "}, "prompt must be text"),
        ({"question": 3}, "question must be text"),
        ({"turns": []}, "turns must be a list"),
        ({"turns": ["a", None]}, "turns must be text"),
        ({"messages": [{"content": "x"}]}, "role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "got 'tool'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing from the user"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ValueError, match="line 2") as error:
        read_prompts(path)
    assert message in str(error.value)


def test_files_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path / "empty.jsonl"))


def test_what_json_allows_in_a_text_does_not_end_its_line(tmp_path: Path) -> None:
    """Faults: a line separator in a text cut its line in two; other files were not named."""
    path = tmp_path / "mine.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(f'\ufeff{{"prompt": "{text}"}}\r\n{{"prompt": "x"}}\r\n', "utf-8")
    assert read_prompts(path) == [Prompt((text,)), Prompt(("x",))]
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match=r"mine.jsonl is not a text in UTF-8"):
        read_prompts(path)
