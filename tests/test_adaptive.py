"""k="auto": what is chosen, that texts do not depend on it, and that no draft KV goes stale."""

import itertools

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import CLOSE_CALL

from specdec.drafters.adaptive import AdaptiveK, widths_up_to


def costs(per_draft):
    """A step costs 1, and ``per_draft`` more for each draft."""
    return {(size, k): 1.0 + per_draft * k for size in (1, 8) for k in (0, 1, 2, 4)}


def run(adaptive, accepted, steps=400):
    chosen = []
    for _ in range(steps):
        k = adaptive.choose(1)
        chosen.append(k)
        adaptive.observe(k, min(accepted, k))
    return chosen


def test_good_drafts_are_taken_and_bad_ones_dropped():
    assert set(run(AdaptiveK(costs(0.1)), accepted=4)[50:]) == {4}
    chosen = run(AdaptiveK(costs(0.1)), accepted=0)
    assert chosen[-1] in (0, 1) and chosen[100:].count(0) / 300 > 0.9
    assert set(run(AdaptiveK(costs(0.1)), accepted=2)[50:]) == {2}
    # A draft that costs more than a step of its own never pays.
    assert run(AdaptiveK(costs(1.5)), accepted=4).count(0) > 350


def test_probes_are_rare_and_find_a_drafter_that_became_good():
    adaptive = AdaptiveK(costs(0.1))
    run(adaptive, accepted=0, steps=300)
    idle = run(adaptive, accepted=0, steps=1000)
    extra = sum(adaptive.costs[1, k] - 1.0 for k in idle)
    assert 0 < extra < 0.011 * sum(adaptive.costs[1, k] for k in idle)
    assert 4 in run(adaptive, accepted=4, steps=2000)


def test_costs_follow_what_steps_take():
    adaptive = AdaptiveK(costs(0.1))
    for _ in range(200):
        adaptive.observe_cost(1, 4, 9.0)
    assert adaptive.costs[1, 4] == pytest.approx(9.0, rel=0.01)
    assert adaptive.costs[8, 4] == 1.4
    winners = {size: k for size, k, _ in adaptive.crossover()}
    assert winners[1] < 4


def test_widths():
    assert [list(widths_up_to(k)) for k in (1, 2, 3, 4, 7)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 7],
    ]


@pytest.mark.parametrize("draft", ["same", "negated", "blend.1", "ngram", "layer_skip:1"])
def test_texts_do_not_depend_on_what_is_chosen(models, oracles, draft):
    with cpu_engine(models["target"], models.get(draft, draft), "auto", k_max=4) as engine:
        assert {row.descriptor.query_len for row in engine.graph_table() if row.role == "step"} == {
            *(1, 2, 3, 5)
        }
        outs = engine.generate(PROMPTS, greedy(60, k="auto"))
        hot = engine.generate(PROMPTS, greedy(30, temperature=1.0, seed=5))
        assert_no_leak(engine)
        assert engine.crossover()
    for prompt, out in zip(PROMPTS, outs, strict=True):
        text, _ = oracles["target"].greedy(prompt, 60)
        _, margins = oracles["target"].choices(prompt + text)
        if min(margins[len(prompt) - 1 : -1]) > CLOSE_CALL:
            assert out.token_ids == text
    with cpu_engine(models["target"], None, max_num_seqs=5) as plain:
        assert [out.token_ids for out in hot] == [
            out.token_ids for out in plain.generate(PROMPTS, greedy(30, temperature=1.0, seed=5))
        ]


@pytest.mark.parametrize("pattern", [(4, 0, 0, 0), (0, 4), (1, 4, 2, 0), (4, *[0] * 20)], ids=str)
def test_the_draft_kv_is_caught_up_after_steps_without_it(models, monkeypatch, pattern):
    """Draft equal to the target: every draft is accepted, whatever steps lay between, or the
    draft's KV had holes. Chance cannot explain it: a stale position makes drafts wrong at once.
    """
    with cpu_engine(models["target"], models["same"], "auto", k_max=4) as engine:
        ks = itertools.cycle(pattern)
        monkeypatch.setattr(engine._adaptive, "choose", lambda num_reqs: next(ks))
        for prompts in (PROMPTS[:1], PROMPTS):
            for out in engine.generate(prompts, greedy(60)):
                assert out.stats.accepted_per_step == out.stats.drafted_per_step
                assert out.stats.drafted > 5
        assert_no_leak(engine)


def test_rows_with_a_k_of_their_own_keep_it(models):
    """Beside rows that adapt, also where these stop drafting for a while."""
    with cpu_engine(models["target"], models["same"], "auto", k_max=4) as engine:
        params = [greedy(40, k=k) for k in (0, 1, 2, 4, "auto")]
        outs = engine.generate(PROMPTS, params)
        for out, k in zip(outs[:4], (0, 1, 2, 4), strict=True):
            assert set(out.stats.drafted_per_step[:-1]) == {k}
            assert out.stats.accepted_per_step == out.stats.drafted_per_step


def test_auto_needs_an_engine_that_adapts(models):
    with (
        cpu_engine(models["target"], "ngram", 4) as engine,
        pytest.raises(ValueError, match="k='auto'"),
    ):
        engine.generate([1, 2], greedy(4, k="auto"))
