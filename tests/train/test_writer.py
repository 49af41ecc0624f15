"""The target writes its own conversations: what they are made of, and that nothing else matters."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made import CHATML, bigram_model
from tiny import make_tiny

import specdec
from specdec.tokenizer import load_tokenizer
from specdec.train import tasks
from specdec.train.corpus import Document
from specdec.train.frames import WRITINGS
from specdec.train.prompts import Prompt
from specdec.train.settings import TrainSettings
from specdec.train.tasks import Shelf
from specdec.train.template import ChatPieces, chat_pieces
from specdec.train.writer import Writer, is_held_out

EOS = 7
SIZES: dict[str, Any] = {
    "seq_len": 160,
    "batch_tokens": 160,
    "max_user_tokens": 12,
    "max_answer_tokens": 20,
    "opening_tokens": 5,
    "num_seqs": 3,
    # Only what the target says itself, unless a test asks for more.
    "rework_share": 0.0,
    "task_share": 0.0,
    "follow_up_share": 0.0,
}
LONG = {"seq_len": 320, "batch_tokens": 320}
OPENING = "<|im_start|>user\n"
REPLY = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    return make_tiny(folder, layers=1, vocab=256, tokenizer="bytes", chat_template=CHATML, eos=EOS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("plain"), layers=1, vocab=64, bos=5)


def never() -> bool:
    return False


def write(
    model: Path,
    numbers: range,
    *,
    prompts: tuple[Prompt, ...] = (),
    shelf: Shelf = Shelf(),
    out_of_time: Callable[[], bool] = never,
    **changes: Any,
) -> list[Document]:
    settings = TrainSettings(out="unused", **(SIZES | changes))
    tokenizer = load_tokenizer(model)
    with specdec.Engine(
        model, device="cpu", max_num_seqs=settings.num_seqs, max_model_len=settings.seq_len
    ) as engine:
        pieces = chat_pieces(tokenizer, engine.model_config.bos_token_id)
        writer = Writer(engine, pieces, tokenizer, settings, prompts)
        plans = [writer.plan(number, shelf) for number in numbers]
        writer.write(plans, out_of_time, lambda _: None)
        engine.check_integrity()
        assert engine.stats().free_kv_blocks == engine.stats().total_kv_blocks
    return [plan.document for plan in plans]


def greedy_answer(model: Path, prompt: list[int], length: int) -> list[int]:
    with specdec.Engine(model, device="cpu", max_num_seqs=1, max_model_len=512) as engine:
        params = specdec.SamplingParams(max_new_tokens=length)
        result = engine.generate(prompt, params)
        assert isinstance(result, specdec.Generation)
        return result.token_ids


def test_chatml_comes_apart(chat: Path) -> None:
    tokenizer = load_tokenizer(chat)
    assert tokenizer is not None
    pieces = chat_pieces(tokenizer, None)
    assert tokenizer.decode(pieces.opening) == OPENING
    assert tokenizer.decode(pieces.reply) == REPLY
    assert pieces.again is not None
    assert tokenizer.decode(pieces.again) == "<|im_end|>\n" + OPENING
    assert pieces.user_end == pieces.reply[0]


def test_a_template_that_changes_messages_is_refused(tmp_path: Path) -> None:
    upper = "{% for m in messages %}[{{ m.content | upper }}]{% endfor %}"
    model = make_tiny(tmp_path, vocab=256, tokenizer="bytes", chat_template=upper)
    with pytest.raises(ValueError, match="chat template"):
        chat_pieces(load_tokenizer(model), None)


def test_a_template_for_one_turn_has_no_second(tmp_path: Path) -> None:
    one = (
        "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
        "Q: {{ messages[0].content }}\nA:"
    )
    model = make_tiny(tmp_path, vocab=256, tokenizer="bytes", chat_template=one)
    assert chat_pieces(load_tokenizer(model), None).again is None


def test_without_a_template_text_starts_at_bos(plain: Path) -> None:
    assert chat_pieces(load_tokenizer(plain), 5) == ChatPieces((5,), (), None, None)


def test_a_conversation_is_a_sampled_message_and_the_targets_own_answer(chat: Path) -> None:
    """The message ends where the model ends it or at its limit; the answer is greedy."""
    tokenizer = load_tokenizer(chat)
    assert tokenizer is not None
    pieces = chat_pieces(tokenizer, None)
    messages = set()
    for document in write(chat, range(1, 6), greedy_share=1.0):
        assert document.greedy
        ((start, end),) = document.spans
        assert end == len(document.tokens)
        prompt, message = document.tokens[:start], document.tokens[len(pieces.opening) : start]
        assert prompt[: len(pieces.opening)] == list(pieces.opening)
        assert message[-len(pieces.reply) :] == list(pieces.reply)
        message = message[: -len(pieces.reply)]
        assert 3 <= len(message) <= 12
        assert not {EOS, pieces.user_end} & set(message)
        messages.add(tuple(message))
        assert document.answer == greedy_answer(chat, prompt, 20)
    assert len(messages) == 5


def test_text_does_not_depend_on_how_many_are_written_at_once(chat: Path) -> None:
    together = write(chat, range(8), greedy_share=0.5)
    assert write(chat, range(8), greedy_share=0.5, num_seqs=1) == together
    assert write(chat, range(5, 6), greedy_share=0.5) == together[5:6]
    assert write(chat, range(8), greedy_share=0.5, seed=1) != together


def test_sampled_answers_open_sampled_and_go_on_greedily(chat: Path) -> None:
    found = [each for each in write(chat, range(1, 9), greedy_share=0.0) if not each.greedy]
    assert len(found) == 8
    differing = 0
    for document in found:
        start, end = document.spans[0]
        cut = min(start + 5, end)
        if end > cut:
            rest = greedy_answer(chat, document.tokens[:cut], 15)
            assert document.tokens[cut:end] == rest
        differing += document.answer[:5] != greedy_answer(chat, document.tokens[:start], 5)
    assert differing >= 6


def test_held_out_documents_are_greedy(chat: Path) -> None:
    assert is_held_out(0) and not is_held_out(1)
    assert write(chat, range(0, 1), greedy_share=0.0)[0].greedy


def test_conversations_go_on(chat: Path) -> None:
    """Each answer is the target's, to all that was said before."""
    tokenizer = load_tokenizer(chat)
    assert tokenizer is not None
    wanted = {"seq_len": 512, "batch_tokens": 512, "follow_up_share": 1.0}
    found = write(chat, range(1, 7), greedy_share=1.0, **wanted)
    assert {len(document.spans) for document in found} == {2, 3}
    for document in found:
        for (_, before), (start, end) in itertools.pairwise(document.spans):
            between = tokenizer.decode(document.tokens[before:start], skip_special_tokens=False)
            assert between.startswith("<|im_end|>\n" + OPENING) and between.endswith(REPLY)
            expected = greedy_answer(chat, document.tokens[:start], 20)
            assert document.tokens[start:end] == expected


def test_an_answers_end_token_is_not_written_twice(chat: Path) -> None:
    """In ChatML the answer ends on the token with which the template goes on."""
    settings = TrainSettings(out="unused", **(SIZES | {"follow_up_share": 1.0}))
    with specdec.Engine(chat, device="cpu", max_num_seqs=1, max_model_len=160) as engine:
        pieces = ChatPieces((1,), (4,), (EOS, 2, 3), EOS)
        writer = Writer(engine, pieces, load_tokenizer(chat), settings)
        plan = writer.plan(1, Shelf())
        for answer, expected in (([9, EOS], [2, 3]), ([9, 9], [EOS, 2, 3])):
            plan.document.tokens = [1, 4, *answer]
            assert writer._before_user(plan, 1) == expected


def test_texts_for_later_prompts_are_sampled_and_long(
    chat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "OF_SUBJECTS", {WRITINGS: 1})
    found = write(chat, range(49, 54), task_share=1.0, greedy_share=1.0, **LONG)
    for document in found:
        ((start, end),) = document.spans
        assert document.greedy == is_held_out(document.number)
        assert end - start == 40
        expected = greedy_answer(chat, document.tokens[:start], 40)
        assert (document.answer == expected) == document.greedy


def test_an_answer_ends_where_it_only_repeats_itself(tmp_path: Path) -> None:
    """The next token hangs on the last alone, so that every greedy text comes to go round."""
    model = bigram_model(tmp_path, bos=1)
    sizes = {"max_answer_tokens": 128, "seq_len": 160}
    for document in write(model, range(1, 9), greedy_share=1.0, **sizes):
        ((start, end),) = document.spans
        expected = greedy_answer(model, document.tokens[:start], 128)
        assert end - start < 100
        assert document.answer == expected[: end - start]


def test_prompts_of_a_file_are_rendered_as_the_engine_renders_them(chat: Path) -> None:
    from specdec.api import chat_prompts

    prompts = (Prompt(("Hello you.",)), Prompt(("One?", "Two?"), system="Be brief."))
    first, second = write(chat, range(2, 4), prompts=prompts, greedy_share=1.0, **LONG)
    with specdec.Engine(chat, device="cpu", max_num_seqs=1, max_model_len=160) as engine:
        assert first.tokens[: first.spans[0][0]] == chat_prompts(engine, "Hello you.")
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
        ]
        assert second.tokens[: second.spans[0][0]] == chat_prompts(engine, messages)
    assert len(first.spans) == 1 and len(second.spans) == 2
    tokenizer = load_tokenizer(chat)
    assert tokenizer is not None
    between = tokenizer.decode(second.tokens[second.spans[0][1] : second.spans[1][0]])
    assert between == "<|im_end|>\n" + OPENING + "Two?" + REPLY


def test_a_prompt_that_leaves_no_room_is_left_out(chat: Path) -> None:
    (document,) = write(chat, range(2, 3), prompts=(Prompt(("x" * 150,)),))
    assert document.spans == [] and document.tokens == []


def test_prompts_hold_earlier_answers(chat: Path) -> None:
    tokenizer = load_tokenizer(chat)
    assert tokenizer is not None
    shelf = Shelf((("The mill stands by the river.", 30), ("Two boats went by.", 20)), ())
    found = write(chat, range(1, 9), shelf=shelf, rework_share=1.0, **LONG)
    for document in found:
        text = tokenizer.decode(document.tokens[: document.spans[0][0]])
        assert text.startswith(OPENING) and text.endswith(REPLY)
        assert "The mill stands by the river." in text or "Two boats went by." in text


def test_plain_text_starts_at_bos_and_goes_on_from_a_sampled_beginning(plain: Path) -> None:
    for document in write(plain, range(1, 5), greedy_share=1.0):
        ((start, end),) = document.spans
        assert document.tokens[0] == 5
        assert 9 <= start <= 13  # bos and 8 to 12 sampled tokens
        assert end == len(document.tokens)
        assert document.answer == greedy_answer(plain, document.tokens[:start], 20)


def test_without_bos_a_text_starts_anywhere(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, layers=1, vocab=64)
    firsts = {document.tokens[0] for document in write(model, range(1, 7))}
    assert len(firsts) > 1


def test_where_time_runs_out_documents_end_as_they_are(chat: Path) -> None:
    calls = itertools.count()
    cut = write(chat, range(1, 9), greedy_share=1.0, out_of_time=lambda: next(calls) > 50)
    whole = write(chat, range(1, 9), greedy_share=1.0)
    assert any(not document.spans for document in cut)
    shorter = 0
    for short, full in zip(cut, whole, strict=True):
        if short.spans:
            assert short.tokens == full.tokens[: len(short.tokens)]
            shorter += len(short.tokens) < len(full.tokens)
    assert shorter
