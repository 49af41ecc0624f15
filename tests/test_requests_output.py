"""P5 and P8 for stop strings, logprobs and streamed text: C15, C52, C55."""

import pytest
import torch
from harness import PROMPTS, cpu_engine, greedy
from spelling import Speller, cut

ONE_RUNG = {"uniform_request_counts": [5]}
LETTERS = [bytes([97 + i]) for i in range(24)]


@pytest.fixture(scope="module")
def speller(tmp_path_factory):
    return Speller(tmp_path_factory.mktemp("speller"))


@pytest.fixture(scope="module")
def letters(speller, tmp_path_factory):
    """The model's text reads abcdefghijklmnopqrstuvwx; a step of k=8 writes b..j, then k..s."""
    folder = speller.spell(tmp_path_factory.mktemp("letters") / "model", LETTERS)
    with cpu_engine(folder, folder, 8, **ONE_RUNG) as engine:
        yield engine


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("a", "", 1),
        ("b", "a", 2),
        ("e", "abcd", 5),
        ("j", "abcdefghi", 10),
        ("jk", "abcdefghi", 11),
        ("hijkl", "abcdefg", 12),
        (["m", "c"], "ab", 3),
        (["def", "e"], "abcd", 5),
        (["efg", "ef"], "abcd", 6),
        ("zz", "abcdefghijklmnopqrst", 20),
    ],
    ids=str,
)
def test_stop_strings(speller, letters, stop, text, num_tokens):
    """C15: on the 1st, 4th and 9th token of a step, across two steps, and the earliest of two."""
    params = greedy(20, stop=stop, logprobs=1)
    out = letters.generate(speller.prompt, params)
    assert out.text == text
    assert out.token_ids == speller.ids[:num_tokens]
    assert len(out.logprobs) == num_tokens
    assert out.finish_reason == ("length" if stop == "zz" else "stop")
    events = list(letters.stream(speller.prompt, params))
    assert "".join(event.text for event in events) == text
    assert [token for event in events for token in event.token_ids] == out.token_ids


def test_text_that_only_might_become_a_stop_string_is_sent_at_the_end(speller, letters):
    events = list(letters.stream(speller.prompt, greedy(10, stop="jkz")))
    assert "".join(event.text for event in events) == "abcdefghij"
    assert events[-1].finish_reason == "length"


def test_a_stop_string_beats_the_length_limit(speller, letters):
    out = letters.generate(speller.prompt, greedy(5, stop="e"))
    assert (out.text, out.finish_reason) == ("abcd", "stop")


def test_a_stop_string_across_one_multi_letter_token(speller, tmp_path):
    """The text ends before the match, inside the token; token_ids keep the whole token."""
    pieces = [b"ab", b"cde", b"fgh", b"i", b"jk"]
    folder = speller.spell(tmp_path / "model", pieces)
    with cpu_engine(folder, folder, 4, **ONE_RUNG) as engine:
        out = engine.generate(speller.prompt, greedy(5, stop="ef"))
        assert (out.text, out.token_ids) == ("abcd", speller.ids[:3])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["same", "negated", "blend.1", None])
def test_logprobs_are_those_of_a_plain_forward_pass(engines, models, oracles, draft, temperature):
    """C52: one entry per token, raw log-softmax, whatever was accepted and whatever samples."""
    engine = engines(models["target"], models.get(draft, draft), 4, **ONE_RUNG)
    params = [
        greedy(length, logprobs=3, temperature=temperature, seed=length, top_k=50)
        for length in (1, 7, 20)
    ]
    prompts = PROMPTS[:3]
    for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
        assert len(out.logprobs) == len(out.token_ids)
        raw = oracles["target"].logits([*prompt, *out.token_ids])[len(prompt) - 1 : -1]
        reference = torch.log_softmax(raw, dim=-1)
        for token, entry, row in zip(out.token_ids, out.logprobs, reference, strict=True):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
            best = row.topk(3)
            for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                assert entry.top[index] == pytest.approx(value, abs=1e-5)
            assert len(entry.top) in (3, 4)


def test_logprobs_end_with_the_text(engines, models, oracles):
    text, _ = oracles["target"].greedy(PROMPTS[3], 12)
    engine = engines(models["target"], models["same"], 4, **ONE_RUNG)
    out = engine.generate(PROMPTS[3], greedy(12, logprobs=0, stop_token_ids=[text[3]]))
    assert [entry.token_id for entry in out.logprobs] == text[:4]


PHRASE = "né 😀 漢字 👩‍👧"


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize(
    ("phrase", "sizes"),
    [
        (PHRASE, [4]),
        (PHRASE, [3, 2]),
        (PHRASE, [2, 3]),
        ("né 漢😀", [1]),
        ("é😀漢", [1, 2]),
        ("😀é漢字", [2]),
    ],
    ids=str,
)
def test_no_half_character_is_streamed(speller, tmp_path, phrase, sizes, k):
    """C55: characters of two to four bytes cut at every border."""
    pieces = cut(phrase, sizes)
    folder = speller.spell(tmp_path / "model", pieces)
    with cpu_engine(folder, folder, k, cudagraph_mode="NONE") as engine:
        params = greedy(len(pieces))
        out = engine.generate(speller.prompt, params)
        events = [event.text for event in engine.stream(speller.prompt, params)]
    assert out.text == "".join(events) == phrase
    assert "�" not in "".join(events)
    assert len(out.token_ids) == len(pieces)


def test_an_incomplete_tail_is_flushed_once_at_the_end(speller, tmp_path):
    """C55: max_new_tokens ends the text in the middle of the emoji."""
    pieces = [b"ok ", b"\xf0\x9f", b"\x98\x80", b"!"]
    folder = speller.spell(tmp_path / "model", pieces)
    with cpu_engine(folder, folder, 4, cudagraph_mode="NONE") as engine:
        texts = [event.text for event in engine.stream(speller.prompt, greedy(2))]
        assert "".join(texts).rstrip("�") == "ok "
        assert all("�" not in text for text in texts[:-1])
        assert engine.generate(speller.prompt, greedy(4)).text == "ok 😀!"
