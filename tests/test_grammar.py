"""Structured output: in the language, the same with and without drafts, and nobody else changed."""

import asyncio
import json
import re
import threading

import pytest
from harness import assert_no_leak, cpu_engine, greedy
from tiny import blended, make_tiny, negated

pytest.importorskip("xgrammar")

from specdec import async_engine
from specdec.async_engine import AsyncEngine
from specdec.errors import EngineOverloadedError
from specdec.grammar import MAX_KEPT, GrammarCompiler

LANGUAGE = {"type": "regex", "regex": "[ab]{3,9}c"}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "pair",
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """Byte tokens, so that every text can be spelled, and an EOS of its own."""
    root = tmp_path_factory.mktemp("spelled")
    target = make_tiny(root / "target", seed=2, vocab=264, tokenizer="bytes", eos=[257])
    return {
        "target": str(target),
        "negated": str(negated(target, root / "negated")),
        "blend": str(blended(target, root / "blend", 0.2)),
        "same": str(target),
    }


def run(spelled, draft, params, *, k=4, **options):
    with cpu_engine(
        spelled["target"], spelled.get(draft, draft), k, max_model_len=128, **options
    ) as engine:
        outs = engine.generate(["abab", "go: ", "x"], params)
        assert_no_leak(engine)
        engine.check_integrity()
        return outs, engine.recent_steps(1000), engine.stats()


@pytest.mark.parametrize("draft", ["same", "negated", "blend", "ngram", "layer_skip:1"])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_text_is_in_the_language_and_does_not_depend_on_the_drafter(spelled, draft, mode):
    """C53: illegal drafts are cut, the mask is of the row's own prefix, EOS follows the last c."""
    params = [
        greedy(40, response_format=LANGUAGE),
        greedy(40, response_format=SCHEMA),
        greedy(110, ignore_eos=True),
    ]
    plain, _, _ = run(spelled, None, params)
    outs, records, _ = run(spelled, draft, params, cudagraph_mode=mode)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert re.fullmatch(LANGUAGE["regex"], outs[0].text) and outs[0].finish_reason == "stop"
    assert set(json.loads(outs[1].text)) == {"a", "b"} and outs[1].finish_reason == "stop"
    split = [record for record in records if "response_format" in (record.reason or "")]
    assert split and {record.mode for record in split} == ({"NONE"} if mode == "NONE" else {"FULL"})
    # The batch goes back to the whole step when no such row is left.
    assert records[-1].reason is None or mode == "NONE" or draft == "same"


def test_drafts_are_accepted_inside_a_format(spelled):
    params = greedy(40, response_format={"type": "regex", "regex": "(ab){15}"})
    outs, _, _ = run(spelled, "ngram", params)
    assert [out.text for out in outs] == ["ab" * 15] * 3
    assert sum(out.stats.accepted for out in outs) > 30
    for out in outs:
        for drafted, accepted in zip(
            out.stats.drafted_per_step, out.stats.accepted_per_step, strict=True
        ):
            assert accepted <= drafted <= 4


@pytest.mark.parametrize("seed", [1, 2])
def test_sampled_text_follows_the_format(spelled, seed):
    params = greedy(60, response_format=SCHEMA, temperature=1.5, seed=seed)
    plain, _, _ = run(spelled, None, params)
    outs, _, _ = run(spelled, "blend", params)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    for out in outs:
        json.loads(out.text)


def test_a_preempted_row_takes_up_its_format_again(spelled):
    """A pool that cannot hold the three rows to their ends."""
    params = greedy(40, response_format={"type": "regex", "regex": "[ab]{30}c"})
    plain, _, _ = run(spelled, None, params)
    outs, _, stats = run(spelled, "blend", params, num_kv_blocks=16)
    assert stats.preemptions > 0
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "xml"},
        {"type": "regex"},
        {"type": "regex", "regex": "("},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
        {"type": "choice", "choice": []},
        {"type": "grammar", "grammar": "not a grammar"},
        "json",
    ],
)
def test_a_bad_format_is_refused_by_name(spelled, response_format):
    with cpu_engine(spelled["target"], None, max_model_len=64) as engine:
        with pytest.raises((ValueError, TypeError), match="response_format"):
            engine.generate("a", greedy(8, response_format=response_format))
        assert engine.generate("a", greedy(8)).token_ids


def test_choice_and_grammar(spelled):
    with cpu_engine(spelled["target"], "ngram", max_model_len=64) as engine:
        choice = {"type": "choice", "choice": ['say "no"', "yes"]}
        grammar = {"type": "grammar", "grammar": 'root ::= "<" [0-9]+ ">"'}
        assert engine.generate("a", greedy(20, response_format=choice)).text in choice["choice"]
        text = engine.generate("a", greedy(40, response_format=grammar)).text
        assert text.startswith("<") and set(text[1:].rstrip(">")) <= set("0123456789")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "regex", "regex": "ab[^\\s\\S]"},
        {"type": "grammar", "grammar": 'root ::= "ab" x\nx ::= x'},
    ],
)
@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_format_without_an_end_is_an_error_of_its_row_alone(spelled, response_format, draft):
    """P7: nothing may follow "ab"; the row ends there, and its neighbour is not disturbed."""
    with cpu_engine(spelled["target"], draft, 4, max_model_len=64) as engine:
        alone = engine.generate("x", greedy(20, ignore_eos=True)).token_ids
        params = [greedy(20, response_format=response_format), greedy(20, ignore_eos=True)]
        stuck, other = engine.generate(["abab", "x"], params)
        assert stuck.finish_reason == "error" and "ab".startswith(stuck.text)
        assert stuck.error is not None and "in this format" in stuck.error
        assert other.token_ids == alone
        assert_no_leak(engine)


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "grammar", "grammar": 'root ::= root "a"'},
        {"type": "regex", "regex": "[^\\s\\S]a"},
        {"type": "choice", "choice": ["w"]},
    ],
    ids=lambda each: each["type"],
)
def test_a_format_that_no_text_can_begin_is_refused_before_it_runs(tmp_path, response_format):
    """Fault: it ran, and ended in "the model's numbers were not finite". No model has a say."""
    folder = str(make_tiny(tmp_path / "model", vocab=264, tokenizer="bytes", eos=[257]))
    if response_format["type"] == "choice":
        # A vocabulary of capital letters, which ends where others have a "w".
        folder = str(make_tiny(tmp_path / "letters", vocab=100, tokenizer="bytes", eos=[0]))
    with cpu_engine(folder, "ngram", max_model_len=64) as engine:
        with pytest.raises(ValueError, match="response_format: no text can begin"):
            engine.generate([65], greedy(8, response_format=response_format))
        assert engine.stats().steps_by_mode == {"FULL": 0, "PIECEWISE": 0, "NONE": 0}
        assert_no_leak(engine)


def test_a_format_compiles_beside_the_steps_of_others(spelled, monkeypatch):
    """Fault: a large schema was compiled in the engine's thread and held up every other request.

    Here it is not done before the other text is: in the engine's thread neither would ever end.
    """
    neighbour_ended = threading.Event()
    compile_schema = GrammarCompiler._compile

    def slow(self, response_format):
        assert neighbour_ended.wait(30)
        return compile_schema(self, response_format)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)

    async def main():
        engine = cpu_engine(spelled["target"], "ngram", 4, max_model_len=64)
        async with AsyncEngine(engine) as front:
            formatted = asyncio.create_task(front.generate("a", greedy(40, response_format=SCHEMA)))
            await asyncio.sleep(0)
            other = await front.generate("x", greedy(20, ignore_eos=True))
            neighbour_ended.set()
            return await formatted, other

    formatted, other = asyncio.run(main())
    assert len(other.token_ids) == 20 and set(json.loads(formatted.text)) == {"a", "b"}


def test_a_format_that_takes_too_long_to_compile_is_refused(spelled, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(async_engine, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda *_: may_end.wait(30))

    async def main():
        engine = cpu_engine(spelled["target"], None, max_model_len=64)
        async with AsyncEngine(engine) as front:
            with pytest.raises(ValueError, match=r"response_format: .*compiled"):
                await front.generate("a", greedy(4, response_format=LANGUAGE))
            may_end.set()
            assert front.num_requests == 0

    asyncio.run(main())


def test_formats_that_take_too_long_hold_up_no_others(spelled, monkeypatch):
    """Fault: two of them took both threads for good, and every format after them was refused."""
    may_end = threading.Event()
    monkeypatch.setattr(async_engine, "COMPILE_SECONDS", 0.2)
    compile_now = GrammarCompiler._compile

    def compile_slowly(self, response_format):
        if "b" in response_format.get("choice", ""):
            may_end.wait(30)
        return compile_now(self, response_format)

    monkeypatch.setattr(GrammarCompiler, "_compile", compile_slowly)

    def slow(number):
        return greedy(4, response_format={"type": "choice", "choice": ["b", "a" * number]})

    async def main():
        engine = cpu_engine(spelled["target"], None, max_model_len=64)
        async with AsyncEngine(engine) as front:
            # Their callers leave at once, so that nobody waits for what they asked.
            left = [asyncio.create_task(front.generate("a", slow(n))) for n in range(1, 5)]
            await asyncio.sleep(0.05)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await front.generate("a", greedy(4, response_format=LANGUAGE))
            for number in (5, 6):
                with pytest.raises(ValueError, match="compiled"):
                    await front.generate("a", slow(number))
            with pytest.raises(EngineOverloadedError, match="4 formats"):
                await front.generate("a", slow(7))
            may_end.set()
            while front._compilers._num_stuck:
                await asyncio.sleep(0.01)
            await front.generate("a", slow(7))
            assert front.num_requests == 0

    asyncio.run(main())


def test_formats_that_are_kept_are_the_last_ones(spelled):
    """P9: distinct formats do not add up, and an equal one is not compiled again."""
    with cpu_engine(spelled["target"], None, max_model_len=64) as engine:
        for number in range(MAX_KEPT + 6):
            engine.prepare_format({"type": "choice", "choice": [f"v{number}"]})
        compiler = engine._intake._grammars
        kept = dict(compiler._kept)
        assert len(kept) == MAX_KEPT
        engine.prepare_format({"type": "choice", "choice": [f"v{MAX_KEPT}"]})
        assert {key: id(value) for key, value in compiler._kept.items()} == {
            key: id(value) for key, value in kept.items()
        }
        with pytest.raises(ValueError, match=r"response_format: it has .* characters"):
            engine.prepare_format({"type": "choice", "choice": ["a" * 300_000]})


def test_what_the_compiler_says_names_no_place_in_its_source(spelled):
    with (
        cpu_engine(spelled["target"], None, max_model_len=64) as engine,
        pytest.raises(ValueError) as error,
    ):
        engine.prepare_format({"type": "grammar", "grammar": "root ::= ("})
    assert str(error.value).startswith("response_format: EBNF"), error.value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "not": {"const": "a"}},
        {"properties": {"not": {"type": "number", "multipleOf": 3}}},
        {"allOf": [{"type": "string"}, {"maxLength": 3}]},
        {"$defs": {"a": {"type": "array", "uniqueItems": True}}},
        None,
    ],
)
def test_schema_keywords_without_effect_are_refused_by_name(spelled, schema):
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    with (
        cpu_engine(spelled["target"], None, max_model_len=64) as engine,
        pytest.raises((ValueError, TypeError), match="response_format"),
    ):
        engine.generate("a", greedy(8, response_format=response_format))


def test_properties_may_have_the_names_of_keywords(spelled):
    schema = {"type": "object", "properties": {"not": {"enum": ["x"]}}, "required": ["not"]}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    with cpu_engine(spelled["target"], "ngram", 4, max_model_len=64) as engine:
        text = engine.generate("a", greedy(40, response_format=response_format)).text
        assert json.loads(text) == {"not": "x"}
