"""P5: EOS, stop tokens, max_new_tokens and the context end are exact inside an accepted run."""

import json
import shutil

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate

RUN = 8  # output tokens that one accepted run of k=6 and its neighbours cover


@pytest.fixture(scope="module")
def varied(oracles):
    """A prompt whose first tokens all differ, so that each can be declared the end."""
    for first in range(128):
        prompt = [first, 17, 99, 3]
        text, _ = oracles["target"].greedy(prompt, RUN + 4)
        if len(set(text[:RUN])) == RUN:
            return prompt, text
    raise AssertionError("no prompt gives a varied text")


@pytest.fixture(scope="module")
def with_eos(models, tmp_path_factory):
    """Copies of the target whose files name other EOS ids."""

    def make(config_eos, generation_eos="absent"):
        folder = tmp_path_factory.mktemp("eos")
        shutil.copytree(models["target"], folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": config_eos}))
        (folder / "generation_config.json").unlink()
        if generation_eos != "absent":
            content = {"eos_token_id": generation_eos, "do_sample": True, "temperature": 5.0}
            (folder / "generation_config.json").write_text(json.dumps(content))
        return str(folder)

    return make


def by_oracle(oracles, draft, prompt, k, eos=(), max_new_tokens=20, **limits):
    return speculate(
        oracles["target"],
        oracles.get(draft),
        prompt,
        k=k,
        max_new_tokens=max_new_tokens,
        eos=eos,
        **limits,
    )


@pytest.mark.parametrize("index", range(RUN))
def test_eos_at_every_place_of_an_accepted_run(models, oracles, varied, with_eos, index):
    """C13: the step that commits EOS commits nothing after it; its drafts are still counted."""
    prompt, text = varied
    graphs = index in (0, 3, 7)
    options = {"uniform_request_counts": [1]} if graphs else {"cudagraph_mode": "NONE"}
    target = with_eos(text[index])
    for draft in ("same", "negated"):
        with cpu_engine(target, models[draft], 6, max_num_seqs=1, **options) as engine:
            out = engine.generate(prompt, greedy(20))
            assert out.token_ids == text[: index + 1]
            assert out.finish_reason == "stop"
            expect(out, by_oracle(oracles, draft, prompt, 6, (text[index],)))
            ignoring = engine.generate(prompt, greedy(20, ignore_eos=True))
            expect(ignoring, by_oracle(oracles, draft, prompt, 6))
            assert_no_leak(engine)


@pytest.mark.parametrize("draft", ["same", "negated", "blend.1"])
def test_stop_token_ids_at_every_place(engines, models, oracles, varied, draft):
    prompt, text = varied
    engine = engines(models["target"], models[draft], 6, uniform_request_counts=[5])
    for first in (0, 4):
        chosen = text[first : first + 4]
        params = [greedy(20, stop_token_ids=[token], ignore_eos=True) for token in chosen]
        outs = engine.generate([prompt] * 4, params)
        for token, out in zip(chosen, outs, strict=True):
            assert out.finish_reason == "stop"
            expect(out, by_oracle(oracles, draft, prompt, 6, (token,)))
    assert_no_leak(engine)


def test_several_eos_ids_the_first_in_the_text_ends_it(models, oracles, varied, with_eos):
    prompt, text = varied
    target = with_eos([text[6], text[2]])
    with cpu_engine(target, models["same"], 6, uniform_request_counts=[5]) as engine:
        out = engine.generate(prompt, greedy(20))
        assert (out.token_ids, out.finish_reason) == (text[:3], "stop")
        both = engine.generate(prompt, greedy(20, ignore_eos=True, stop_token_ids=[text[6]]))
        assert (both.token_ids, both.finish_reason) == (text[:7], "stop")


def test_eos_comes_from_generation_config_and_nothing_else_does(models, oracles, varied, with_eos):
    """generation_config.json also asks for sampling at temperature 5 here: greedy stays greedy."""
    prompt, text = varied
    with cpu_engine(with_eos(text[1], text[4]), None, cudagraph_mode="NONE") as engine:
        out = engine.generate(prompt, greedy(20))
        assert (out.token_ids, out.finish_reason) == (text[:5], "stop")
    with cpu_engine(with_eos(text[1], None), None, cudagraph_mode="NONE") as engine:
        assert engine.generate(prompt, greedy(20)).token_ids == text[:2]


def test_eos_at_the_length_limit_is_a_stop(engines, models, oracles, varied):
    prompt, text = varied
    engine = engines(models["target"], models["same"], 6, uniform_request_counts=[5])
    limits = [1, 4, RUN]
    params = [greedy(limit, stop_token_ids=[text[limit - 1]]) for limit in limits]
    for limit, out in zip(limits, engine.generate([prompt] * 3, params), strict=True):
        assert (out.token_ids, out.finish_reason) == (text[:limit], "stop")


def test_rows_that_end_early_leave_the_others_alone(engines, models, oracles, varied):
    prompt, text = varied
    engine = engines(models["target"], models["blend.1"], 6, uniform_request_counts=[5])
    prompts = [prompt, PROMPTS[1], PROMPTS[3], prompt, PROMPTS[4]]
    stops = [(text[2],), (), (), (text[0],), ()]
    params = [
        greedy(length, stop_token_ids=list(stop))
        for length, stop in zip((20, 3, 20, 20, 11), stops, strict=True)
    ]
    outs = engine.generate(prompts, params)
    for i, (one, stop) in enumerate(zip(prompts, stops, strict=True)):
        expected = by_oracle(
            oracles, "blend.1", one, 6, stop, max_new_tokens=params[i].max_new_tokens
        )
        expect(outs[i], expected)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", ["same", "negated"])
def test_exactly_max_new_tokens(engines, models, oracles, draft, mode):
    """C16: never one more, never one less, and the drafts shrink to what may still be written."""
    engine = engines(
        models["target"], models[draft], 4, uniform_request_counts=[5], cudagraph_mode=mode
    )
    for lengths in ((1, 2, 3, 4), (5, 6, 7, 8)):
        params = [greedy(length) for length in lengths]
        outs = engine.generate([PROMPTS[3]] * 4, params)
        for length, out in zip(lengths, outs, strict=True):
            assert len(out.token_ids) == length
            assert out.prompt_tokens == len(PROMPTS[3])
            expect(out, by_oracle(oracles, draft, PROMPTS[3], 4, max_new_tokens=length))
    assert_no_leak(engine)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_k_far_above_the_length(engines, models, oracles, mode):
    engine = engines(
        models["target"],
        models["same"],
        16,
        max_num_seqs=1,
        uniform_request_counts=[1],
        cudagraph_mode=mode,
    )
    for length in (1, 2, 3, 18):
        out = engine.generate(PROMPTS[0], greedy(length))
        expect(out, by_oracle(oracles, "same", PROMPTS[0], 16, max_new_tokens=length))


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", ["same", "negated", "ngram", "layer_skip:1"])
def test_context_end(engines, models, oracles, draft, mode):
    """C17: k=8 drafts would pass the end of the context; no slot past it exists."""
    engine = engines(
        models["target"],
        models.get(draft, draft),
        8,
        max_model_len=32,
        max_num_seqs=8,
        uniform_request_counts=[8],
        cudagraph_mode=mode,
    )
    whole = (PROMPTS[4] + PROMPTS[3] * 2)[:31]
    prompts = [whole[:length] for length in range(24, 32)]
    for params in (greedy(256), greedy(100)):
        for prompt, out in zip(prompts, engine.generate(prompts, params), strict=True):
            expected = by_oracle(
                oracles,
                draft,
                prompt,
                8,
                max_new_tokens=params.max_new_tokens,
                max_model_len=32,
            )
            assert len(out.token_ids) == 32 - len(prompt)
            expect(out, expected, counts=draft != "ngram")
    assert_no_leak(engine)


@pytest.mark.parametrize("length", [32, 33, 500])
def test_prompts_that_fill_the_context_are_refused(engines, models, oracles, length):
    """C17: named before anything runs, alone or among others, and the next request works."""
    engine = engines(models["target"], models["same"], 4, max_model_len=32, cudagraph_mode="NONE")
    before = engine.stats().steps_by_mode
    for prompts in ([1] * length, [PROMPTS[0], [1] * length]):
        with pytest.raises(ValueError, match=r"(?s)(prompt|max_model_len).*32|32.*max_model_len"):
            engine.generate(prompts, greedy(4))
    assert engine.stats().steps_by_mode == before
    assert_no_leak(engine)
    out = engine.generate(PROMPTS[0], greedy(6))
    expect(out, by_oracle(oracles, "same", PROMPTS[0], 4, max_new_tokens=6))


def test_nothing_later_is_streamed(engines, models, oracles, varied):
    prompt, text = varied
    engine = engines(models["target"], models["same"], 6, uniform_request_counts=[5])
    events = list(engine.stream(prompt, greedy(20, stop_token_ids=[text[3]])))
    assert [token for event in events for token in event.token_ids] == text[:4]
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == "stop"
