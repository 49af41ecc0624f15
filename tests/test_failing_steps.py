"""P7: a request whose steps fail ends alone, in "error", and everybody else's text is exact."""

import asyncio

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate

import specdec
from specdec import engine as engine_module
from specdec.async_engine import AsyncEngine

BAD = [123, 4]
BOOM = "RuntimeError: I cannot draft 123"


class Picky(specdec.Drafter):
    """A host drafter that fails wherever some text holds the token 123, as ``BAD`` does."""

    name = "picky"

    def propose(self, state, k):
        for text, length in zip(state.tokens.tolist(), state.seq_lens.tolist(), strict=True):
            if 123 in text[:length]:
                raise RuntimeError("I cannot draft 123")
        return state.last_token[:, None].expand(-1, k)


def fails_with(monkeypatch, prompt):
    """Launches raise wherever a request of this prompt is in the plan."""
    launch = engine_module.launch

    def planted(runner, plan):
        if any(request.prompt_ids == prompt for request in plan.requests):
            raise RuntimeError("I cannot draft 123")
        return launch(runner, plan)

    monkeypatch.setattr(engine_module, "launch", planted)


def test_only_the_request_that_fails_alone_ends(models, oracles):
    """Fault: the first failed step ended every request of the call.

    ``BAD`` fails in every decode step and the others in none without it, so no chance is in it.
    """
    prompts = [PROMPTS[0], BAD, PROMPTS[3], PROMPTS[1]]
    with cpu_engine(models["target"], Picky(), 4, cudagraph_mode="NONE") as engine:
        outs = engine.generate(prompts, greedy(20))
        bad = outs.pop(1)
        assert (bad.finish_reason, bad.error) == ("error", BOOM)
        assert bad.token_ids == oracles["target"].greedy(BAD, 1)[0]
        for prompt, out in zip([PROMPTS[0], PROMPTS[3], PROMPTS[1]], outs, strict=True):
            assert out.token_ids == oracles["target"].greedy(prompt, 20)[0]
            assert (out.finish_reason, out.error) == ("length", None)
        assert_no_leak(engine)
        engine.check_integrity()
        with pytest.raises(RuntimeError, match="cannot draft"):
            engine.generate(BAD, greedy(9))


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 8},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 6},
        {"async_scheduling": True},
        {"async_scheduling": True, "steps_per_replay": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_texts_and_counts_of_the_others_are_those_of_a_solo_run(
    models, oracles, monkeypatch, options
):
    """The pool holds two of the texts at most, or rows take turns, or tokens are read late.

    Fault kind: while suspects run alone, rows that wait still hold blocks and nobody goes on.
    A draft model whose KV were stale after a failed step would change the counts.
    """
    fails_with(monkeypatch, BAD)
    prompts = [PROMPTS[0], PROMPTS[2], BAD, PROMPTS[3], PROMPTS[0]]
    with cpu_engine(models["target"], models["blend.3"], 4, **options) as engine:
        outs = engine.generate(prompts, greedy(18))
        bad = outs.pop(2)
        assert (bad.token_ids, bad.finish_reason, bad.error) == ([], "error", BOOM)
        for prompt, out in zip(prompts[:2] + prompts[3:], outs, strict=True):
            reference = oracles["target"], oracles["blend.3"]
            expect(out, speculate(*reference, prompt, k=4, max_new_tokens=18))
        assert_no_leak(engine)
        engine.check_integrity()


def test_a_stream_does_not_die_of_another_s_failure(models, oracles):
    """Fault: whoever asked for the next event got the other's exception and was aborted."""
    with cpu_engine(models["target"], Picky(), 4, cudagraph_mode="NONE") as engine:
        good = engine.stream(PROMPTS[0], greedy(20))
        bad = engine.stream(BAD, greedy(20))
        ids = [token for event in good for token in event.token_ids]
        assert ids == oracles["target"].greedy(PROMPTS[0], 20)[0]
        last = list(bad)[-1]
        assert (last.finish_reason, last.error) == ("error", BOOM)
        assert_no_leak(engine)


def test_a_suspect_that_is_aborted_holds_up_nobody(models, oracles):
    with cpu_engine(models["target"], Picky(), 4, cudagraph_mode="NONE") as engine:
        (bad,) = engine.add_request(BAD, greedy(20))
        (good,) = engine.add_request(PROMPTS[0], greedy(20))
        while not engine._scheduler.suspects:
            engine.step()
        engine.abort(bad.id)
        while good.finish_reason is None:
            engine.step()
        assert bad.finish_reason == "abort"
        assert good.output_ids == oracles["target"].greedy(PROMPTS[0], 20)[0]
        assert_no_leak(engine)


def test_what_comes_and_goes_ends_nobody(models, oracles, monkeypatch):
    """Every third launch fails, for ever: a prefill and a step succeed between two failures.

    More than three failures befall each text, so counts that no token resets would end both.
    """
    launch, calls = engine_module.launch, []

    def flaky(runner, plan):
        calls.append(plan)
        if len(calls) % 3 == 0:
            raise RuntimeError("flaky")
        return launch(runner, plan)

    monkeypatch.setattr(engine_module, "launch", flaky)
    with cpu_engine(models["target"], "ngram", 4) as engine:
        prompts = [PROMPTS[3], PROMPTS[0]]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
            assert out.token_ids == oracles["target"].greedy(prompt, 30)[0]
        assert len(calls) > 12


@pytest.mark.parametrize("drafter", ["picky", "always"])
def test_the_async_front_goes_on(models, oracles, drafter):
    """Fault: the count of failures began anew with each prefill, and the loop never ended.

    The bound is generous: five requests need under a hundred steps.
    """

    class Always(specdec.Drafter):
        name = "always"

        def propose(self, state, k):
            raise RuntimeError("I cannot draft 123")

    async def main():
        chosen = Picky() if drafter == "picky" else Always()
        engine = cpu_engine(models["target"], chosen, 4, cudagraph_mode="NONE")
        async with AsyncEngine(engine) as front:
            tasks = [front.generate(prompt, greedy(12)) for prompt in (*PROMPTS[:3], BAD)]
            outs = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            late = await asyncio.wait_for(front.generate(PROMPTS[0], greedy(12, k=0)), 60)
            assert len(engine.recent_steps(1000)) < 100
            assert_no_leak(engine)
            return [*outs, late]

    *outs, bad, late = asyncio.run(main())
    assert late.token_ids == oracles["target"].greedy(PROMPTS[0], 12)[0]
    assert (bad.finish_reason, bad.error) == ("error", BOOM)
    for prompt, out in zip(PROMPTS, outs, strict=False):
        if drafter == "picky":
            assert out.token_ids == oracles["target"].greedy(prompt, 12)[0]
        else:
            assert (out.finish_reason, out.error) == ("error", BOOM)


def test_a_drafter_that_cannot_learn_costs_no_text(models, oracles):
    """Fault kind: what fails after a text's last token left its rows and blocks half given back."""

    class Forgetful(specdec.Drafter):
        name = "forgetful"

        def propose(self, state, k):
            return state.last_token[:, None].expand(-1, k)

        def learn(self, token_ids, group):
            raise RuntimeError("no room")

    with cpu_engine(models["target"], Forgetful(), 4, cudagraph_mode="NONE") as engine:
        outs = engine.generate([PROMPTS[0], PROMPTS[3]], greedy(9))
        assert outs[1].token_ids == oracles["target"].greedy(PROMPTS[3], 9)[0]
        engine.check_integrity()
        assert_no_leak(engine)


def test_results_can_be_compared_and_copied(models):
    """Fault: ``choices`` held the result itself, so == and asdict recursed without end."""
    import dataclasses

    with cpu_engine(models["target"], "ngram", 4, cudagraph_mode="NONE") as engine:
        first, second = engine.generate([PROMPTS[0]] * 2, greedy(6, n=2, temperature=1.0, seed=4))
        other = engine.generate(PROMPTS[3], greedy(6))
    assert first == second and first != other and second in [other, first]
    assert first.choices[0] is first and len(first.choices) == 2
    values = dataclasses.asdict(first)
    assert values["token_ids"] == first.token_ids
    assert values["further_choices"][0]["token_ids"] == first.choices[1].token_ids
    assert dataclasses.replace(first, text="a").choices[0].text == "a"
    repr(first)
