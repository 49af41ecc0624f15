"""k="auto" in an engine: texts do not depend on what is chosen, no draft KV goes stale, and graphs
are timed and rows given their k as the choice (``test_adaptive_choice.py``) expects.
"""

import itertools
from types import SimpleNamespace

import pytest
from adapters import write_adapter
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import CLOSE_CALL

from specdec.adaptation import Adaptation
from specdec.drafters.adaptive import Batch


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
        monkeypatch.setattr(engine._adaptation.choice, "choose", lambda batch: next(ks))
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


def test_every_graph_is_timed_at_two_contexts(tmp_path, models):
    """Base keys, adapters' and the catch-up's; and the rows written for it are gone."""
    adapter = write_adapter(tmp_path / "adapter", models["target"], std=0.3)
    with cpu_engine(
        models["target"], models["blend.1"], "auto", k_max=2, lora={"style": adapter},
        uniform_request_counts=[2, 5],
    ) as engine:  # fmt: skip
        costs = engine._adaptation.choice.costs
        assert (costs.sizes, costs.ks) == ([2, 5], [0, 1, 2])
        for size, k, has_lora in itertools.product((2, 5), (0, 1, 2), (False, True)):
            assert costs.is_timed(size, has_lora=has_lora)
            timing = costs.timing(size, k, has_lora)
            # The longest text has 96 tokens; the step's own come on top of the context.
            assert (timing.short_context, timing.long_context) == (95 - k, 95 - k)
            assert timing.short_seconds > 0
        assert costs.catch_up_passes(1) == 1 and costs.catch_up_seconds(2, 1) > 0
        contexts = {(row.num_reqs, row.has_lora) for row in engine.crossover()}
        assert contexts == {(2, False), (5, False), (2, True), (5, True)}
        assert all(set(row.tokens_per_second) == {0, 1, 2} for row in engine.crossover())
        state = engine._runner.state
        assert state.column("adapter").eq(-1).all()
        assert not state.seq_len.any() and not state.tokens.any() and not state.block_table.any()
        engine.check_integrity()


def test_long_texts_are_timed_short_and_long(models):
    with cpu_engine(
        models["target"], "ngram", "auto", k_max=1, max_model_len=400, max_num_seqs=1
    ) as engine:
        timing = engine._adaptation.choice.costs.timing(1, 1)
        assert (timing.short_context, timing.long_context) == (128, 398)
        assert [row.context for row in engine.crossover()] == [128, 399]
    # Where the pool is short, of as many tokens as it holds.
    with cpu_engine(
        models["target"], "ngram", "auto", k_max=1, max_model_len=400, max_num_seqs=2,
        num_kv_blocks=100,
    ) as engine:  # fmt: skip
        costs = engine._adaptation.choice.costs
        assert [costs.timing(size, 0).long_context for size in (1, 2)] == [399, 199]


def test_an_engine_without_graphs_is_timed_too(models):
    with cpu_engine(models["target"], "ngram", "auto", k_max=2, cudagraph_mode="NONE") as engine:
        assert engine._adaptation.choice.costs.sizes == [1, 5]
        assert engine.crossover()
        engine.generate(PROMPTS, greedy(12, k="auto"))


def test_rows_draft_as_much_as_pays_for_them(models, monkeypatch):
    """One row that accepts nothing beside rows that accept all: its tail is masked, and counted
    nowhere; the graph, and the texts, stay as they are.
    """
    options = {"max_model_len": 256, "uniform_request_counts": [5]}
    with cpu_engine(models["target"], models["same"], "auto", k_max=4, **options) as engine:
        monkeypatch.setattr(engine._adaptation.choice, "choose", lambda batch: 4)
        group = [engine.add_request(prompt, greedy(150))[0] for prompt in PROMPTS[:3]]
        while any(request.finish_reason is None for request in group):
            group[1].acceptance = 0.0
            engine.step()
        texts = [engine.generation([request]) for request in group]
        together = [record.k for record in engine.recent_steps(1000) if record.num_reqs == 3]
    widths = texts[1].stats.drafted_per_step
    assert widths[:10] == [4] * 10 and set(widths[18:-1]) == {1}
    assert set(texts[0].stats.drafted_per_step[:-1]) == {4}
    assert set(together[1:25]) == {4}
    with cpu_engine(models["target"], None, **options) as plain:
        assert [out.token_ids for out in texts] == [
            plain.generate(prompt, greedy(150)).token_ids for prompt in PROMPTS[:3]
        ]


def test_adapters_are_learnt_apart(tmp_path, models, monkeypatch):
    """The draft model fits the base and not the adapter: both are known after one batch."""
    adapter = write_adapter(tmp_path / "adapter", models["target"], std=2.0)
    with cpu_engine(
        models["target"], models["same"], "auto", k_max=4, lora={"style": adapter},
        uniform_request_counts=[5],
    ) as engine:  # fmt: skip
        monkeypatch.setattr(engine._adaptation.choice, "choose", lambda batch: 4)
        names = [None, "style", None, "style", None]
        outs = engine.generate(PROMPTS, greedy(60), names)
        choice = engine._adaptation.choice
        rates = engine.stats().by_adapter
        assert rates["base"].acceptance_rate > 0.99
        assert rates["style"].acceptance_rate < 0.5
        assert choice.acceptance(0, "base") > 0.9
        assert choice.acceptance(0, "style") < 0.7
    with cpu_engine(models["target"], None, lora={"style": adapter}) as plain:
        expected = plain.generate(PROMPTS, greedy(60), names)
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


def test_what_a_step_took_is_noted_for_the_step_that_took_it(models):
    """Where results are read late, the time between two launches is of the step before."""
    with cpu_engine(models["target"], "ngram", "auto", k_max=2, uniform_request_counts=[5]) as e:
        for reads_late in (False, True):
            adaptation = Adaptation(e._adaptation.choice.costs, e._runner, reads_late=reads_late)
            noted = []
            adaptation.choice.costs = SimpleNamespace(
                observe=lambda num_reqs, k, seconds, noted=noted, **more: noted.append(
                    (num_reqs, k, seconds, more["waited"])
                )
            )
            decoding = SimpleNamespace(prefills=[], decodes=[1, 2])
            mixed = SimpleNamespace(prefills=[1], decodes=[1, 2], k=1)
            for k, seconds, plan, rounds in (
                (1, None, decoding, 1), (2, 4.0, decoding, 2), (0, 6.0, decoding, 1),
                (0, None, mixed, 1), (2, None, decoding, 1), (2, 3.0, decoding, 1),
            ):  # fmt: skip
                adaptation._batch = Batch(num_reqs=2, rows={("base", 2): 2})
                plan = SimpleNamespace(**vars(plan) | {"k": k})
                adaptation.after_step(plan, seconds, 1.0, rounds)
            if reads_late:
                assert noted == [(2, 1, 4.0, 1.0), (2, 2, 3.0, 0.5), (2, 2, 3.0, 1.0)]
            else:
                assert noted == [(2, 2, 2.0, None), (2, 0, 6.0, None), (2, 2, 3.0, None)]
