"""P1, P5, P8: several rounds in one replay give the tokens and the counts of one round a replay."""

import pytest
from adapters import write_adapter
from eagle_heads import make_head, whispering
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate
from tiny import make_tiny

LENGTHS = (3, 9, 30, 17, 44)
ONE_RUNG = {"uniform_request_counts": [5], "capture": "lazy"}


def counts(out):
    return (
        out.token_ids,
        out.finish_reason,
        out.stats.drafted_per_step,
        out.stats.accepted_per_step,
        out.stats.committed_by_steps,
    )


def rounds_taken(engine):
    return [record.rounds for record in engine.recent_steps(10_000)]


def assert_same_as_one_round(engine, one, prompts, params, *, several=True):
    """All results are those of the engine ``one``; and some replay had several rounds."""
    before = len(engine.recent_steps(10_000))
    for ours, theirs in zip(
        engine.generate(prompts, params), one.generate(prompts, params), strict=True
    ):
        assert counts(ours) == counts(theirs)
        assert ours.logprobs == theirs.logprobs
    assert_decodes_replayed(engine)
    assert_no_leak(engine)
    if several:
        assert engine.config.steps_per_replay in rounds_taken(engine)[before:]


@pytest.mark.parametrize("rounds", [2, 3, 4, 8])
@pytest.mark.parametrize("draft", ["blend.1", "ngram", "layer_skip:1", None])
def test_tokens_and_counts_are_those_of_one_round(engines, models, draft, rounds):
    def engine_of(steps_per_replay):
        return engines(
            models["target"],
            models.get(draft, draft),
            3,
            steps_per_replay=steps_per_replay,
            **ONE_RUNG,
        )

    params = [greedy(length) for length in LENGTHS]
    assert_same_as_one_round(engine_of(rounds), engine_of(1), PROMPTS, params)
    alone = engine_of(rounds).generate(PROMPTS[2], params[4])
    assert counts(alone) == counts(engine_of(1).generate(PROMPTS[2], params[4]))


@pytest.mark.parametrize("pattern", ["suffix", "ngram+{}"])
def test_lookup_in_several_rounds(models, pattern):
    """Of one request at a time, counts by drafter too are those of one round."""
    found = []
    for rounds in (1, 4):
        with cpu_engine(
            models["target"], pattern.format(models["blend.1"]), 3, steps_per_replay=rounds,
            **ONE_RUNG,
        ) as engine:  # fmt: skip
            texts = [counts(engine.generate(prompt, greedy(40))) for prompt in [*PROMPTS] * 2]
            found.append((texts, engine.stats().by_source))
            assert rounds in rounds_taken(engine)
    assert found[0] == found[1]
    assert found[0][1]


@pytest.mark.parametrize("parallel", [False, True])
def test_a_draft_head_in_several_rounds(tmp_path, parallel):
    """It reads hidden states that the round before has written; k=0 rounds write them too."""
    target = str(whispering(tmp_path / "target"))
    head = make_head(target, tmp_path / "head", parallel=parallel)
    params = [greedy(length) for length in LENGTHS[1:]] + [greedy(21, temperature=0.8, seed=1)]
    params[2] = greedy(30, k=0)
    engine, one = (
        cpu_engine(target, f"eagle:{head}", 3, steps_per_replay=rounds, **ONE_RUNG)
        for rounds in (4, 1)
    )
    with engine, one:
        assert_same_as_one_round(engine, one, PROMPTS, params)
        assert engine.stats().accepted > 0


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("draft", ["blend.1", "ngram"])
def test_sampled_rows_rules_and_logprobs(engines, models, draft, acceptance):
    engine, one = (
        engines(
            models["target"], models.get(draft, draft), 3, steps_per_replay=rounds,
            acceptance=acceptance, **ONE_RUNG,
        )
        for rounds in (4, 1)
    )  # fmt: skip
    params = [
        greedy(31, temperature=0.9, seed=5, top_p=0.9),
        greedy(27, presence_penalty=0.7, frequency_penalty=0.4, logprobs=3),
        greedy(30, min_tokens=9, stop_token_ids=list(range(0, 128, 5))),
        greedy(22, bad_words=[[17], [4, 5]], temperature=0.4, seed=6, logprobs=0),
        greedy(35),
    ]
    assert_same_as_one_round(engine, one, PROMPTS, params)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("draft", ["same", "negated", None])
def test_an_end_at_every_place_of_a_replay(engines, models, oracles, draft, late):
    """A stop token is the last that the device writes, wherever in the rounds it stands.

    With the target as its own draft a replay of 3 rounds holds 9 tokens; without one it holds 3.
    """
    engine = engines(
        models["target"], models.get(draft), 2, steps_per_replay=3, async_scheduling=late,
        **ONE_RUNG,
    )  # fmt: skip
    prompt = PROMPTS[3]
    text, _ = oracles["target"].greedy(prompt, 30)
    places = [place for place in range(14) if text[place] not in text[:place]]
    assert len({(place - 1) % 9 for place in places if place}) >= 7
    for place in places:
        out = engine.generate(prompt, greedy(30, stop_token_ids=[text[place]]))
        assert out.token_ids == text[: place + 1] and out.finish_reason == "stop"
        expected = speculate(oracles["target"], oracles.get(draft), prompt, k=2, max_new_tokens=30)
        at = out.stats.steps
        assert out.stats.drafted_per_step == expected.drafted[:at]
        state = engine._runner.state
        assert state.seq_len[0] == state.column("end")[0] == len(prompt) + place + 1
    assert 3 in rounds_taken(engine)
    for length in range(1, 13):
        out = engine.generate(prompt, greedy(length))
        expect(out, speculate(oracles["target"], oracles.get(draft), prompt, k=2 if draft else 0,
                              max_new_tokens=length))  # fmt: skip


def test_more_stop_tokens_than_the_device_holds(engines, models):
    """The host ends the text at those; what the device ran behind it counts nowhere."""
    engine, one = (
        engines(models["target"], models["same"], 3, steps_per_replay=rounds, **ONE_RUNG)
        for rounds in (4, 1)
    )
    params = [greedy(40, stop_token_ids=list(range(low, 128, 2))) for low in (0, 1, 20, 41, 60)]
    assert_same_as_one_round(engine, one, PROMPTS, params)
    before = engine.stats()
    out = engine.generate(PROMPTS[0], params[0])
    assert engine.stats().drafted - before.drafted == out.stats.drafted


def test_stop_strings_cut_after_the_fact(tmp_path):
    model = str(make_tiny(tmp_path / "words", seed=4, tokenizer="bytes", vocab=300))
    texts = {}
    for rounds in (1, 4):
        with cpu_engine(model, model, 3, steps_per_replay=rounds, **ONE_RUNG) as engine:
            free = engine.generate("abc", greedy(40))
            stops = [free.text[place : place + 2] for place in range(1, 20, 3)]
            outs = [engine.generate("abc", greedy(40, stop=[stop])) for stop in stops if stop]
            texts[rounds] = [(out.text, *counts(out)) for out in [free, *outs]]
            assert_no_leak(engine)
            if rounds > 1:
                assert rounds in rounds_taken(engine)
    assert texts[1] == texts[4]
    assert {reason for _, _, reason, *_ in texts[4]} == {"stop", "length"}


def test_streams_come_step_by_step_and_aborts_count_up_to_theirs(engines, models, oracles):
    """Each step is an event of its own; at most R of them come from one launch."""
    engine = engines(models["target"], models["same"], 2, steps_per_replay=4, **ONE_RUNG)
    text, _ = oracles["target"].greedy(PROMPTS[0], 50)
    launches = []
    ids = []
    for event in engine.stream(PROMPTS[0], greedy(50)):
        launches.append(len(engine.recent_steps(10_000)))
        ids += event.token_ids
        assert 1 <= len(event.token_ids) <= 3
    assert ids == text
    assert max(launches.count(number) for number in launches) == 4
    neighbour = engine.stream(PROMPTS[3], greedy(50))
    for steps in range(1, 9):
        before = engine.stats()
        stream = engine.stream(PROMPTS[0], greedy(50))
        ids = [token for _ in range(steps) for token in next(stream).token_ids]
        stream.close()
        assert ids == text[: len(ids)]
        assert engine.stats().accepted >= before.accepted
    rest = [token for event in neighbour for token in event.token_ids]
    assert rest == oracles["target"].greedy(PROMPTS[3], 50)[0]
    assert_no_leak(engine)


@pytest.mark.parametrize("late", [False, True])
def test_a_short_pool_falls_back_to_one_round(models, oracles, late):
    """Blocks for R rounds ahead are taken only where all rows find theirs."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, steps_per_replay=4, num_kv_blocks=14,
        max_num_seqs=4, max_model_len=40, async_scheduling=late,
    ) as engine:  # fmt: skip
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[3], PROMPTS[2]]
        lengths = (24, 22, 26, 20)
        outs = engine.generate(prompts, [greedy(length) for length in lengths])
        for prompt, length, out in zip(prompts, lengths, outs, strict=True):
            expect(
                out,
                speculate(
                    oracles["target"], oracles["blend.1"], prompt, k=4, max_new_tokens=length
                ),
            )
        reasons = [r.rounds_reason for r in engine.recent_steps(1000) if r.rounds_reason]
        assert any("KV blocks ahead" in reason for reason in reasons)
        assert 4 in rounds_taken(engine)
        assert_no_leak(engine)
        engine.check_integrity()
    with cpu_engine(
        models["target"], models["same"], 4, steps_per_replay=8, num_kv_blocks=8,
        max_num_seqs=2, max_model_len=32, async_scheduling=late,
    ) as engine:  # fmt: skip
        out = engine.generate(PROMPTS[3][:8], greedy(24))
        assert out.token_ids == oracles["target"].greedy(PROMPTS[3][:8], 24)[0]
        assert 8 in rounds_taken(engine)


def test_a_prefix_hit_behind_several_rounds(engines, models, oracles):
    """What R rounds wrote is cached like what one wrote: the hit costs no acceptance."""
    engine = engines(models["target"], models["same"], 3, steps_per_replay=4, **ONE_RUNG)
    first = engine.generate(PROMPTS[4], greedy(30))
    longer = PROMPTS[4] + first.token_ids
    before = engine._scheduler.num_cached_tokens
    out = engine.generate(longer, greedy(21))
    assert engine._scheduler.num_cached_tokens - before >= len(longer) - 8
    assert out.token_ids == oracles["target"].greedy(longer, 21)[0]
    assert out.stats.acceptance_rate == 1.0


def test_drafting_again_after_rounds_without(engines, models):
    """k=0 rounds leave the draft's KV behind by as many tokens; it catches up on all of them."""
    engine = engines(models["target"], models["same"], 3, steps_per_replay=8, **ONE_RUNG)
    running = engine.add_request(PROMPTS[0], greedy(80, k=0))[0]
    # One pass catches up on 16 tokens, so this takes three.
    while running.stats.steps < 40:
        engine.step()
    assert 8 in rounds_taken(engine)
    joined = engine.add_request(PROMPTS[3], greedy(20))[0]
    while joined.finish_reason is None:
        engine.step()
    assert joined.stats.acceptance_rate == 1.0
    # The k=0 row rode along with rows that draft, so its own draft KV is whole again.
    state = engine._runner.state
    assert state.draft_len[running.row] >= state.seq_len[running.row] - 2
    engine.abort(running.id)


def test_adapters_have_graphs_of_several_rounds_too(tmp_path, models):
    folder = write_adapter(tmp_path / "a", models["target"], seed=1)
    outs = {}
    for rounds in (1, 4):
        with cpu_engine(
            models["target"], "layer_skip:1", 2, steps_per_replay=rounds, lora={"a": folder},
            **ONE_RUNG,
        ) as engine:  # fmt: skip
            adapters = ["a", None, "a", None, "a"]
            outs[rounds] = engine.generate(PROMPTS, greedy(25), lora=adapters)
            table = [row for row in engine.graph_table() if row.rounds == rounds and row.replays]
            assert {row.descriptor.has_lora for row in table} >= {True}
            assert engine.stats().by_adapter["a"].drafted > 0
    for one, several in zip(outs[1], outs[4], strict=True):
        assert counts(one) == counts(several)


def test_adaptive_k_stays_fixed_within_a_replay(models, oracles):
    with cpu_engine(
        models["target"], models["same"], "auto", k_max=4, steps_per_replay=4, **ONE_RUNG
    ) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(40)), strict=True):
            assert out.token_ids == oracles["target"].greedy(prompt, 40)[0]
        assert 4 in rounds_taken(engine)


# -- why one round ----------------------------------------------------------------------------


def reasons(engine):
    return {record.rounds_reason for record in engine.recent_steps(1000) if record.rounds == 1}


def test_one_round_says_why(engines, models):
    engine = engines(models["target"], models["same"], 2, steps_per_replay=4, **ONE_RUNG)
    engine.generate(PROMPTS, greedy(4))
    assert "every text is about to end" in reasons(engine)
    stream = engine.stream(PROMPTS[0], greedy(40))
    next(stream), next(stream)
    late = engine.add_request(PROMPTS[4], greedy(2))[0]
    engine.step()
    record = engine.recent_steps(1)[0]
    assert (record.rounds, record.rounds_reason) == (1, "prompts wait or share the step")
    assert late.output_ids
    stream.close()
    narrow = engines(
        models["target"], models["same"], 2, steps_per_replay=4, max_num_batched_tokens=8,
        **ONE_RUNG,
    )  # fmt: skip
    narrow.generate(PROMPTS[:3], greedy(20))
    assert "max_num_batched_tokens: rows take turns" in reasons(narrow)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cudagraph_mode": "NONE"}, "cudagraph_mode is NONE"),
        ({"cudagraph_mode": "PIECEWISE"}, "cudagraph_mode is PIECEWISE"),
    ],
)
def test_an_engine_without_full_graphs_takes_one(engines, models, options, reason):
    engine = engines(models["target"], models["same"], 2, steps_per_replay=4, **options)
    engine.generate(PROMPTS[0], greedy(12))
    assert set(rounds_taken(engine)) == {1}
    assert reason in reasons(engine)


def test_a_drafter_on_the_host_takes_one(models):
    class Host:
        def propose(self, state, k):
            return state.last_token[:, None].expand(-1, k)

    with cpu_engine(models["target"], Host(), 2, steps_per_replay=4, **ONE_RUNG) as engine:
        engine.generate(PROMPTS[0], greedy(12))
        assert "drafter 'Host' drafts on the host" in reasons(engine)


def test_auto_is_one_round_on_a_cpu(engines, models):
    engine = engines(models["target"], models["same"], 2, **ONE_RUNG)
    engine.generate(PROMPTS[0], greedy(20))
    assert set(rounds_taken(engine)) == {1}


@pytest.mark.parametrize("value", [0, 9, -1, True, 2.0, "two"])
def test_bad_numbers_are_refused_by_name(models, value):
    with pytest.raises((ValueError, TypeError), match="steps_per_replay"):
        cpu_engine(models["target"], steps_per_replay=value)


# -- graphs -----------------------------------------------------------------------------------


def test_graphs_of_several_rounds_are_captured_at_start(models):
    with cpu_engine(
        models["target"], "ngram", 2, steps_per_replay=3, max_num_seqs=6, verify_graphs=True
    ) as engine:
        table = engine.graph_table()
        several = {row.descriptor for row in table if row.rounds == 3}
        one = {row.descriptor for row in table if row.rounds == 1 and row.role == "step"}
        assert several <= one
        for query_len in (1, 3):
            sizes = {key.num_reqs for key in several if key.query_len == query_len}
            assert sizes == {1, 2, 4, 6}
        engine.generate(PROMPTS, greedy(30))
        replayed = [row for row in engine.graph_table() if row.rounds == 3 and row.replays]
        assert replayed and all(row.max_error == 0.0 for row in replayed)


def test_a_size_without_rounds_takes_one_and_says_why(models):
    with cpu_engine(models["target"], "ngram", 2, steps_per_replay=3, **ONE_RUNG) as engine:
        runner = engine._runner
        dispatcher = runner._decode.dispatcher
        for mode, key in dispatcher.capture_list(3):
            dispatcher.remove_key(mode, key, "no room", 3)
        engine.generate(PROMPTS, greedy(20))
        assert set(rounds_taken(engine)) == {1}
        assert "no room" in reasons(engine)
        assert_decodes_replayed(engine)
