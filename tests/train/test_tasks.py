"""What users ask for in the written conversations, and where an answer goes round in a circle."""

import random
from collections import Counter
from pathlib import Path

import pytest
from tiny import make_tiny

from specdec.tokenizer import load_tokenizer
from specdec.train import frames
from specdec.train.corpus import Document
from specdec.train.frames import fill, long_words, some_sentences, topics_in, whole_sentences
from specdec.train.repeats import MAX_PERIOD, MIN_REPEATED, circle_end
from specdec.train.settings import TrainSettings
from specdec.train.tasks import MIN_TEXT_TOKENS, Shelf, Tasks

ALL = {
    name: getattr(frames, name)
    for name in (
        *("TASKS", "WRITINGS", "OVER_TEXT", "TRANSLATIONS", "OVER_PASSAGES", "FOLLOW_UPS", "SUMS"),
    )
}
TEXT = "The Old Mill stands by the river. It was built by Ann Smith. It burned down. It stands."


@pytest.mark.parametrize("name", ALL)
def test_every_frame_can_be_filled(name: str) -> None:
    for frame in ALL[name]:
        text = fill(frame, random.Random(0), [TEXT, "Curly {braces} stay."], ["X"])
        assert text.strip() and len(text) >= len(frame) - 60
        assert ("{text}" not in frame and "{passages}" not in frame) or TEXT in text
        assert ("{passages}" in frame) == ("{braces}" in text)
        assert "{topic}" not in text and "{language}" not in text
    assert len(set(ALL[name])) == len(ALL[name])


def test_topics_and_sentences_of_a_text() -> None:
    text = "1. **Bread baking**: see Ada Lovelace of Kent, and the Bank of England.\nNo more"
    assert topics_in(text) == ["Bread baking", "Ada Lovelace of Kent", "Bank of England"]
    assert long_words("A quieter river, a quieter shore and machines") == ["machines", "quieter"]
    assert whole_sentences("One. Two! And thr") == "One. Two!"
    assert whole_sentences("none at all") == "none at all"
    for seed in range(20):
        part = some_sentences(TEXT, random.Random(seed))
        assert part and part in TEXT and part.endswith(".")


def drawn(number: int, shelf: Shelf, **shares: float) -> Counter[str]:
    """Which kinds of frames the first messages of so many conversations are."""
    settings = TrainSettings(out="unused", follow_up_share=0.5, **shares)
    found: Counter[str] = Counter()
    for seed in range(number):
        turns, is_writing = Tasks(settings, random.Random(seed), shelf).turns(follow=True)
        first = turns[0]
        kind = "own" if first is None else "text" if "zebra" in first.turns[0] else "subject"
        found[kind] += 1
        found["writing"] += is_writing
        found["further"] += len(turns) > 1
        assert len(turns) <= 3 and not (is_writing and len(turns) > 1)
    return found


def test_shares_are_kept() -> None:
    shelf = Shelf((("A zebra is long.", 50), ("We sat by the zebra.", 44)), ("a bridge",))
    found = drawn(1000, shelf, rework_share=0.4, task_share=0.0)
    # Four in a hundred is more than two and a half standard deviations.
    assert 360 < found["text"] < 440 and found["text"] + found["own"] == 1000
    assert 450 < found["further"] < 550
    found = drawn(300, Shelf(), rework_share=0.5, task_share=0.5)
    assert found["subject"] == 300 and found["text"] == 0
    assert 60 < found["writing"] < 120


def test_texts_leave_room_for_an_answer() -> None:
    shelf = Shelf(tuple((f"River {i}. " + "word " * 500, 500) for i in range(6)))
    settings = TrainSettings(out="unused", rework_share=1.0, task_share=0.0)
    for seed in range(50):
        turns, _ = Tasks(settings, random.Random(seed), shelf).turns(follow=False)
        assert turns[0] is not None
        words = len(turns[0].turns[0].split())
        assert words < settings.seq_len - settings.max_answer_tokens - 50


def test_a_shelf_holds_long_answers_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tiny(tmp_path, layers=1, vocab=256, tokenizer="bytes"))
    assert tokenizer is not None
    long, short = tokenizer.encode(TEXT), tokenizer.encode("Short.")
    assert len(long) > MIN_TEXT_TOKENS > len(short)
    document = Document(0, True, [1, *long, 1, *short], [(1, 1 + len(long))])
    document.spans.append((2 + len(long), 2 + len(long) + len(short)))
    shelf = Shelf.of([document], tokenizer)
    assert shelf.texts == ((TEXT, len(long)),)
    assert shelf.topics == ("Ann Smith", "The Old Mill")
    assert Shelf.of([document], None) == Shelf()


@pytest.mark.parametrize("period", [1, 2, 7, 40, MAX_PERIOD])
def test_a_circle_ends_after_its_second_round(period: int) -> None:
    start = list(range(1000, 1050))
    tokens = start + list(range(period)) * 400
    ends = {circle_end(tokens[:length]) for length in range(50, 50 + 4 * MAX_PERIOD)}
    assert ends == {None, 50 + max(2 * period, MIN_REPEATED // 2)}
    # It shows after a third round, or after enough tokens.
    first = next(n for n in range(50, len(tokens)) if circle_end(tokens[:n]) is not None)
    assert first == 50 + max(3 * period, period + MIN_REPEATED)


def test_text_that_does_not_go_round_has_no_circle() -> None:
    generator = random.Random(0)
    words = [generator.randrange(30) for _ in range(300)]
    assert all(circle_end(words[:n]) is None for n in range(301))
    assert circle_end([]) is None
    # A circle that is too long, and one that was left again.
    long = list(range(MAX_PERIOD + 1)) * 5
    assert circle_end(long) is None
    assert circle_end([5] * 100 + words[:20]) is None
