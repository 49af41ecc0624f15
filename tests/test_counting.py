"""P8: usage, acceptance and step numbers are true."""

import pytest
from harness import PROMPTS, cpu_engine, full_steps, greedy
from oracle import expect, speculate
from tiny import constant_model, make_tiny

ONE_RUNG = {"uniform_request_counts": [5]}


def assert_consistent(out, k):
    """Every number of a Generation follows from its two lists of counts."""
    stats = out.stats
    steps = list(zip(stats.drafted_per_step, stats.accepted_per_step, strict=True))
    assert stats.steps == len(steps)
    assert stats.drafted == sum(drafted for drafted, _ in steps)
    assert stats.accepted == sum(accepted for _, accepted in steps)
    assert all(0 <= accepted <= drafted <= k for drafted, accepted in steps)
    rate = stats.accepted / stats.drafted if stats.drafted else 0.0
    assert stats.acceptance_rate == pytest.approx(rate)
    mean = (len(out.token_ids) - 1) / stats.steps if stats.steps else 0.0
    assert stats.mean_tokens_per_step == pytest.approx(mean)
    for place, acceptance in enumerate(stats.acceptance_by_position):
        tried = sum(drafted > place for drafted, _ in steps)
        if tried:
            kept = sum(accepted > place for _, accepted in steps)
            assert acceptance == pytest.approx(kept / tried)
    assert len(stats.acceptance_by_position) >= max((drafted for drafted, _ in steps), default=0)


@pytest.mark.parametrize("draft", ["same", "negated", "blend.1", "blend.3", "ngram", None])
def test_numbers_of_a_generation_agree(engines, models, draft):
    engine = engines(models["target"], models.get(draft, draft), 4, **ONE_RUNG)
    for out in engine.generate(PROMPTS, [greedy(length) for length in (1, 2, 3, 11, 30)]):
        assert_consistent(out, 4)
    if draft is None:
        assert out.stats.drafted_per_step == [0] * 29


def test_first_token_is_no_step(engines, models):
    engine = engines(models["target"], models["same"], 4, **ONE_RUNG)
    stats = engine.generate(PROMPTS[0], greedy(1)).stats
    assert (stats.steps, stats.drafted, stats.accepted) == (0, 0, 0)
    assert stats.drafted_per_step == stats.accepted_per_step == []
    assert (stats.acceptance_rate, stats.mean_tokens_per_step) == (0.0, 0.0)


def test_perfect_and_useless_drafts(engines, models):
    same = engines(models["target"], models["same"], 4, **ONE_RUNG)
    stats = same.generate(PROMPTS[0], greedy(21)).stats
    assert (stats.steps, stats.acceptance_rate, stats.mean_tokens_per_step) == (4, 1.0, 5.0)
    assert stats.acceptance_by_position[:4] == [1.0] * 4
    useless = engines(models["target"], models["negated"], 4, **ONE_RUNG)
    stats = useless.generate(PROMPTS[0], greedy(21)).stats
    assert (stats.steps, stats.acceptance_rate, stats.mean_tokens_per_step) == (20, 0.0, 1.0)
    assert stats.drafted_per_step == [4] * 16 + [3, 2, 1, 0]


def test_drafts_of_the_step_that_ends_at_a_stop_token_are_counted(engines, models, oracles):
    """drafted is what was verified; accepted only what was committed up to the end."""
    prompt = PROMPTS[3]
    text, _ = oracles["target"].greedy(prompt, 30)
    engine = engines(models["target"], models["same"], 4, **ONE_RUNG)
    places = [place for place in range(2, 12) if text[place] not in text[:place]]
    assert len({(place - 1) % 5 for place in places}) >= 3
    for place in places:
        out = engine.generate(prompt, greedy(30, stop_token_ids=[text[place]]))
        assert out.token_ids == text[: place + 1]
        full, rest = divmod(place, 5)
        # The first step commits outputs 1..5: a stop at its place rest has accepted rest drafts.
        assert out.stats.drafted_per_step == [4] * (full + (rest > 0))
        assert out.stats.accepted_per_step == [4] * full + [rest] * (rest > 0)
        assert_consistent(out, 4)


def test_engine_totals_are_the_sums_of_the_requests(models):
    with cpu_engine(models["target"], models["blend.1"], 4, **ONE_RUNG) as engine:
        assert (engine.stats().drafted, engine.stats().accepted) == (0, 0)
        outs = engine.generate(PROMPTS, [greedy(length) for length in (7, 1, 20, 13, 2)])
        outs.append(engine.generate(PROMPTS[1], greedy(9, k=2)))
        totals = engine.stats()
        assert totals.drafted == sum(out.stats.drafted for out in outs)
        assert totals.accepted == sum(out.stats.accepted for out in outs)
        by_position = [
            sum(accepted > place for out in outs for accepted in out.stats.accepted_per_step)
            for place in range(4)
        ]
        assert list(totals.accepted_by_position)[:4] == by_position
        assert sum(totals.accepted_by_position) == totals.accepted


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
def test_counts_depend_on_neither_load_nor_graphs(engines, models, oracles, mode):
    engine = engines(models["target"], models["blend.1"], 4, cudagraph_mode=mode, **ONE_RUNG)
    for batch in ([0], [0, 1, 2, 3, 4], [3, 0, 0, 4]):
        prompts = [PROMPTS[i] for i in batch]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(18)), strict=True):
            expected = speculate(
                oracles["target"], oracles["blend.1"], prompt, k=4, max_new_tokens=18
            )
            expect(out, expected)


def test_running_rows_keep_drafting_while_others_prefill(models, oracles):
    """A long prompt arrives in chunks; the counts of the running row are those of its solo run."""
    with cpu_engine(
        models["target"], models["same"], 4, max_num_batched_tokens=26, **ONE_RUNG
    ) as engine:
        running = engine.stream(PROMPTS[0], greedy(60))
        sizes = [len(next(running).token_ids)]
        late = engine.stream(PROMPTS[4] * 3, greedy(8))
        ids = list(next(late).token_ids)
        sizes += [len(event.token_ids) for event in running]
        ids += [token for event in late for token in event.token_ids]
        assert sum(sizes) == 60
        assert ids == oracles["target"].greedy(PROMPTS[4] * 3, 8)[0]
        # 4 accepted and a bonus at every step: 59 tokens behind the first in 12 steps each.
        assert engine.stats().drafted == 11 * 4 + 3 + 4 + 1


def test_a_request_with_k_0_drafts_nothing(engines, models, oracles):
    engine = engines(models["target"], models["same"], 4, **ONE_RUNG)
    outs = engine.generate(PROMPTS[:3], [greedy(9, k=0), greedy(9), greedy(9, k=0)])
    assert outs[0].stats.drafted_per_step == outs[2].stats.drafted_per_step == [0] * 8
    assert outs[1].stats.drafted_per_step == [4, 2]
    for prompt, out in zip(PROMPTS, outs, strict=False):
        assert out.token_ids == oracles["target"].greedy(prompt, 9)[0]
    # The draft's cache lags by eight tokens now; the next request starts from a clean one.
    out = engine.generate(PROMPTS[0], greedy(21))
    assert out.stats.acceptance_rate == 1.0


def test_ngram_counts_only_what_it_proposed(tmp_path):
    """A text without a repeat drafts nothing; a constant text is drafted and accepted whole."""
    constant = constant_model(tmp_path / "constant", [0.1] * 6 + [0.4])
    with cpu_engine(str(constant), "ngram", 4, **ONE_RUNG) as engine:
        out = engine.generate([0, 1, 2], greedy(40))
        assert out.token_ids == [6] * 40
        # Nothing in [0, 1, 2, 6] comes back.
        assert out.stats.drafted_per_step[0] == 0
        assert out.stats.accepted == out.stats.drafted > 0
        assert_consistent(out, 4)
    varied = make_tiny(tmp_path / "varied", seed=5)
    with cpu_engine(str(varied), "ngram", 4, **ONE_RUNG) as engine:
        out = engine.generate(list(range(20)), greedy(30))
        text = [*range(20), *out.token_ids]
        at = 21
        steps = zip(out.stats.drafted_per_step, out.stats.accepted_per_step, strict=True)
        for drafted, accepted in steps:
            if text[at - 1] not in text[: at - 1]:
                assert drafted == 0
            at += accepted + 1
        assert_consistent(out, 4)


def test_usage_is_the_number_of_tokens(engines, models):
    engine = engines(models["target"], models["same"], 4, **ONE_RUNG)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(13)), strict=True):
        assert out.prompt_tokens == len(prompt)
        assert len(out.token_ids) == 13
        assert out.text == ""


def test_steps_by_mode_and_records_agree(models):
    with cpu_engine(models["target"], models["blend.1"], 3, **ONE_RUNG) as engine:
        outs = engine.generate(PROMPTS[:2], greedy(12))
        by_mode = engine.stats().steps_by_mode
        records = engine.recent_steps(1000)
        assert len(records) == sum(by_mode.values())
        for mode in ("FULL", "PIECEWISE", "NONE"):
            assert sum(record.mode == mode for record in records) == by_mode.get(mode, 0)
        assert full_steps(engine) == max(out.stats.steps for out in outs)
        assert engine.recent_steps(2) == records[-2:]
        decoding = [record for record in records if record.mode == "FULL"]
        assert {record.num_reqs for record in decoding} <= {1, 2}
        assert all(0 <= record.k <= 3 for record in decoding)


def test_an_aborted_request_is_counted_up_to_its_abort(models, oracles):
    """What was committed and delivered counts; what the device ran later does not."""
    with cpu_engine(models["target"], models["same"], 4, **ONE_RUNG) as engine:
        events = engine.stream(PROMPTS[0], greedy(60))
        ids = [token for _ in range(4) for token in next(events).token_ids]
        engine.abort(next(events).request_id)
        list(events)
        assert engine.stats().accepted <= engine.stats().drafted <= 4 * len(ids)
        before = engine.stats().drafted
        engine.generate(PROMPTS[3], greedy(6))
        assert engine.stats().drafted == before + 4
        assert ids == oracles["target"].greedy(PROMPTS[0], 60)[0][: len(ids)]
