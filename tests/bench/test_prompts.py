"""Prompt files, prompts of a length, and the lists that the command line takes."""

from collections import Counter
from pathlib import Path

import pytest

from specdec.bench import prompts
from specdec.bench.command import parse_numbers, parse_rates, parse_widths


def test_the_shipped_prompts_are_a_few_of_each_kind() -> None:
    shipped = prompts.load_prompts()
    counts = Counter(prompt.category for prompt in shipped)
    assert set(counts) == {"chat", "qa", "math", "summarization", "code", "translation"}
    assert set(counts.values()) == {4}
    assert len({prompt.id for prompt in shipped}) == len(shipped)
    assert len({prompt.text for prompt in shipped}) == len(shipped)


def test_few_prompts_are_taken_from_all_categories() -> None:
    chosen = prompts.spread(prompts.load_prompts(), 8)
    counts = Counter(prompt.category for prompt in chosen)
    assert len(counts) == 6
    assert max(counts.values()) == 2
    with pytest.raises(ValueError, match="num_prompts"):
        prompts.spread(chosen, 0)


def test_prompts_of_a_length_go_on_with_the_next_text() -> None:
    texts = [[1, 2, 3], [4, 5], [6]]
    assert prompts.of_length(texts, 4) == [[1, 2, 3, 4], [4, 5, 6, 1], [6, 1, 2, 3]]
    assert prompts.of_length(texts, 2) == [[1, 2], [4, 5], [6, 1]]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "holds no prompt"),
        ('{"id": 1, "category": "a", "turns": ["x"]}\nnot json', "line 2: not JSON"),
        ('{"id": 1, "category": "a"}', "line 1: turns"),
        ('{"id": 1, "turns": []}', "line 1: turns"),
        ('{"id": 1, "turns": [3]}', "line 1: turns"),
        ("[1, 2]", "line 1: expected an object"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_line(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"mine.jsonl.*{named}"):
        prompts.load_prompts(path)


def test_prompt_files_of_both_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '{"id": 7, "category": "a", "sub": null, "turns": ["first", "second"]}\n\n'
        '{"question_id": 8, "turns": ["third"]}\n'
    )
    assert prompts.load_prompts(path) == [
        prompts.Prompt(id="7", category="a", text="first"),
        prompts.Prompt(id="8", category="all", text="third"),
    ]


def test_what_json_allows_in_a_text_does_not_end_its_line(tmp_path: Path) -> None:
    """Fault: a line separator inside a text cut its line in two, "not JSON"."""
    path = tmp_path / "mine.jsonl"
    text = "one\u2028two\x85three"
    path.write_text(
        f'\ufeff{{"category": null, "turns": ["{text}"]}}\r\n{{"turns": ["x"]}}\r\n', "utf-8"
    )
    first, second = prompts.load_prompts(path)
    assert (first.text, first.category, second.text) == (text, "all", "x")
    path.write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(ValueError, match=r"mine.jsonl is not a text in UTF-8"):
        prompts.load_prompts(path)


def test_a_digest_is_of_the_texts_and_not_of_their_file(tmp_path: Path) -> None:
    digests = set()
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).write_text(f'{{"turns": ["{text}"]}}')
        digests.add(prompts.prompts_digest(prompts.load_prompts(tmp_path / name)))
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0..3", (0, 1, 2, 3)), ("4", (4,)), ("8,1,3", (1, 3, 8)), ("0,2..4", (0, 2, 3, 4))],
)
def test_lists_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers("--k", text) == numbers


@pytest.mark.parametrize(
    ("text", "widths"),
    [("auto", ("auto",)), ("0..2,auto", (0, 1, 2, "auto")), ("auto,4", (4, "auto"))],
)
def test_lists_of_widths(text: str, widths: tuple[int | str, ...]) -> None:
    assert parse_widths("--k", text) == widths


@pytest.mark.parametrize("text", ["", "0.5,x", "-1", "nan", "inf"])
def test_bad_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--simulate-acceptance"):
        parse_rates("--simulate-acceptance", text)


@pytest.mark.parametrize("text", ["", "a", "1,", "-1", "1..", "1.5", "4..1", "1,4..1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--k"):
        parse_numbers("--k", text)
