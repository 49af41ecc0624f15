"""P4 through the engine: replayed steps give what eager steps give, and the counters tell which.

On the CPU the graphs are recordings, which freeze Python values as a CUDA capture does, so stale
values, padding faults and dispatch faults show here.
"""

import pytest
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, full_steps, greedy
from oracle import expect, speculate


def by_oracle(oracles, draft, prompt, k, max_new_tokens, **limits):
    return speculate(
        oracles["target"],
        oracles.get(draft),
        prompt,
        k=k,
        max_new_tokens=max_new_tokens,
        **limits,
    )


def steps_since(engine, before):
    after = engine.stats().steps_by_mode
    return {mode: count - before.get(mode, 0) for mode, count in after.items()}


@pytest.mark.parametrize("draft", ["blend.1", "ngram", "layer_skip:1", None])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_same_text_and_counts(engines, models, draft, temperature):
    """Sampled rows too: one seed, one text, whether the step was replayed or run."""
    engine_of = {
        mode: engines(
            models["target"],
            models.get(draft, draft),
            4,
            cudagraph_mode=mode,
            acceptance="rejection",
            uniform_request_counts=[2, 5],
        )
        for mode in ("FULL_AND_PIECEWISE", "NONE")
    }
    params = [
        greedy(12 + 3 * i, temperature=temperature, seed=i, top_p=0.9, top_k=40) for i in range(5)
    ]
    replayed, run = (engine.generate(PROMPTS, params) for engine in engine_of.values())
    assert_decodes_replayed(engine_of["FULL_AND_PIECEWISE"])
    assert full_steps(engine_of["NONE"]) == 0
    for one, other in zip(replayed, run, strict=True):
        assert one.token_ids == other.token_ids
        assert one.stats.drafted_per_step == other.stats.drafted_per_step
        assert one.stats.accepted_per_step == other.stats.accepted_per_step


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("draft", ["blend.1", "ngram"])
def test_a_prompt_of_the_verify_shape_is_a_prefill(engines, models, oracles, draft, k):
    """C25: a prompt of exactly 1+k tokens looks like a verify row and must not take its graph."""
    engine = engines(
        models["target"], models.get(draft, draft), k, max_num_seqs=4, max_num_batched_tokens=64,
        uniform_request_counts=[1, 2, 4],
    )  # fmt: skip
    source = PROMPTS[4]
    for length in range(1, k + 4):
        before = engine.stats().steps_by_mode
        out = engine.generate(source[:length], greedy(9))
        expected = by_oracle(oracles, draft, source[:length], k, 9)
        expect(out, expected, counts=draft != "ngram")
        assert steps_since(engine, before)["FULL"] == out.stats.steps
        prefill = engine.recent_steps(1 + out.stats.steps)[0]
        assert prefill.mode != "FULL" and "prefill" in prefill.reason.lower()
    for num_reqs in (3, 4):
        prompts = [source[i : i + 1 + k] for i in range(num_reqs)]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(9)), strict=True):
            expect(out, by_oracle(oracles, draft, prompt, k, 9), counts=draft != "ngram")


def test_prompts_of_the_verify_shape_among_running_rows(engines, models, oracles):
    """C25: arrivals of 1+k tokens while others decode; one chunk ends with a rest of 1+k."""
    k = 4
    engine = engines(
        models["target"], models["blend.1"], k, max_num_seqs=4, max_num_batched_tokens=20,
        uniform_request_counts=[1, 2, 4],
    )  # fmt: skip
    prompts = [PROMPTS[0], PROMPTS[4][: 1 + k], PROMPTS[3][: 1 + k], (PROMPTS[4] * 2)[: 20 + 1 + k]]
    texts = [[] for _ in prompts]
    streams = []
    for i, prompt in enumerate(prompts):
        streams.append(engine.stream(prompt, greedy(24)))
        for j, stream in enumerate(streams[: i + 1]):
            texts[j] += next(stream).token_ids
    for i, stream in enumerate(streams):
        texts[i] += [token for event in stream for token in event.token_ids]
        assert texts[i] == oracles["target"].greedy(prompts[i], 24)[0]
    assert_no_leak(engine)


@pytest.mark.parametrize(("max_num_seqs", "k"), [(9, 2), (6, 3), (9, 1), (5, 7)])
def test_every_batch_up_to_the_largest_has_a_full_graph(models, oracles, max_num_seqs, k):
    """C28: the default grid, sizes that are no multiple of 1+k, padding to the next rung only."""
    with cpu_engine(
        models["target"], models["blend.1"], k, max_num_seqs=max_num_seqs, max_model_len=64
    ) as engine:
        for num_reqs in range(1, max_num_seqs + 1):
            prompts = [PROMPTS[i % 4] for i in range(num_reqs)]
            for prompt, out in zip(prompts, engine.generate(prompts, greedy(7)), strict=True):
                expect(out, by_oracle(oracles, "blend.1", prompt, k, 7))
        assert_decodes_replayed(engine)
        replayed = [record for record in engine.recent_steps(1000) if record.mode == "FULL"]
        assert {record.num_reqs for record in replayed} == set(range(1, max_num_seqs + 1))
        rungs = {
            row.descriptor.num_reqs
            for row in engine.graph_table()
            if row.mode == "FULL" and row.descriptor.uniform
        }
        assert max(rungs) == max_num_seqs
        for record in replayed:
            shape = record.descriptor
            assert shape.uniform and not shape.has_lora
            assert shape.num_reqs == min(rung for rung in rungs if rung >= record.num_reqs)
            assert shape.num_tokens % shape.num_reqs == 0
            assert record.num_tokens <= shape.num_tokens <= shape.num_reqs * (1 + k)


def test_replays_are_counted_by_key(models):
    with cpu_engine(models["target"], models["same"], 3, uniform_request_counts=[2, 5]) as engine:
        engine.generate(PROMPTS[:2], greedy(17))
        engine.generate(PROMPTS, greedy(9))
        rows = [row for row in engine.graph_table() if row.role == "step"]
        assert rows
        assert sum(row.replays for row in rows) == full_steps(engine)
        used = {row.descriptor.num_reqs for row in rows if row.replays}
        assert used == {2, 5}
        for row in engine.graph_table():
            assert row.mode == ("FULL" if row.descriptor.uniform else "PIECEWISE")
            assert row.variant in ("greedy", "sampled")
            assert row.num_bytes >= 0 and row.capture_seconds >= 0


@pytest.mark.parametrize("sizes", [[4, 8, 16], [5], [40], [0, 45], [-5, 45]])
def test_capture_sizes_that_leave_a_batch_without_a_graph_are_refused(models, sizes):
    """C28: nine rows of 1+4 tokens need 45; the message holds a list that works."""
    with pytest.raises(ValueError, match="cudagraph_capture_sizes") as refusal:
        cpu_engine(
            models["target"], models["same"], 4, max_num_seqs=9, cudagraph_capture_sizes=sizes
        )
    if max(sizes) < 45:
        assert "45" in str(refusal.value)


def test_capture_sizes_are_tokens_rounded_up_to_whole_rows(models, oracles):
    with cpu_engine(
        models["target"], models["same"], 4, max_num_seqs=3, cudagraph_capture_sizes=[3, 4, 7, 15]
    ) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS[:3], greedy(14)), strict=False):
            expect(out, by_oracle(oracles, "same", prompt, 4, 14))
        verify = {
            row.descriptor
            for row in engine.graph_table()
            if row.role in ("step", "target") and row.descriptor.num_tokens
            == 5 * row.descriptor.num_reqs
        }  # fmt: skip
        assert {shape.num_tokens for shape in verify} == {5, 10, 15}


def test_request_counts_must_reach_the_largest_batch(models):
    with pytest.raises(ValueError, match="uniform_request_counts"):
        cpu_engine(models["target"], models["same"], 4, uniform_request_counts=[1, 4])


def test_rows_of_all_lengths_on_one_graph(models, oracles):
    """C30: captured with short rows, replayed with rows at and past block borders."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, max_num_seqs=6, max_model_len=256,
        kv_block_size=16, uniform_request_counts=[6],
    ) as engine:  # fmt: skip
        expect(engine.generate([9], greedy(3)), by_oracle(oracles, "blend.1", [9], 4, 3))
        source = [(37 * i + i * i) % 128 for i in range(200)]
        for lengths in ((1, 15, 16, 17, 33, 180), (180, 1, 31, 16, 64, 2)):
            prompts = [source[:length] for length in lengths]
            for prompt, out in zip(prompts, engine.generate(prompts, greedy(24)), strict=True):
                expect(out, by_oracle(oracles, "blend.1", prompt, 4, 24))


def test_two_engines_in_one_process(models, oracles):
    """C31: the second captures after the first has replayed; closing one leaves the other."""
    options = {"uniform_request_counts": [5]}
    first = cpu_engine(models["target"], models["same"], 2, **options)
    expect(first.generate(PROMPTS[0], greedy(9)), by_oracle(oracles, "same", PROMPTS[0], 2, 9))
    second = cpu_engine(models["blend.3"], models["target"], 3, **options)
    swapped = speculate(oracles["blend.3"], oracles["target"], PROMPTS[3], k=3, max_new_tokens=12)
    expect(second.generate(PROMPTS[3], greedy(12)), swapped)
    expect(first.generate(PROMPTS[3], greedy(9)), by_oracle(oracles, "same", PROMPTS[3], 2, 9))
    first.close()
    expect(second.generate(PROMPTS[3], greedy(12)), swapped)
    second.close()


def test_lazy_capture_gives_the_same_text(models, oracles):
    """C31: a shape seen for the first time between two steps of running requests."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, max_num_seqs=3, capture="lazy"
    ) as engine:
        assert [row for row in engine.graph_table() if row.replays] == []
        for num_reqs in (1, 3, 2):
            prompts = PROMPTS[:num_reqs]
            for prompt, out in zip(prompts, engine.generate(prompts, greedy(15)), strict=True):
                expect(out, by_oracle(oracles, "blend.1", prompt, 3, 15))
        assert full_steps(engine) > 0


def test_sampling_first_and_greedy_after(models, oracles):
    """C31: the sampled variant may be captured late, in the middle of traffic."""
    with cpu_engine(
        models["target"], models["blend.1"], 3, uniform_request_counts=[5], acceptance="rejection"
    ) as engine:
        hot = greedy(12, temperature=1.0, seed=5)
        first = engine.generate(PROMPTS, hot)
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(12)), strict=True):
            expect(out, by_oracle(oracles, "blend.1", prompt, 3, 12))
        again = engine.generate(PROMPTS, hot)
        assert_decodes_replayed(engine)
        assert [out.token_ids for out in again] == [out.token_ids for out in first]


@pytest.mark.parametrize("mode", ["FULL", "FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_every_mode_is_served_by_the_best_there_is(models, oracles, mode):
    """Each mode gives the same text; modes with a FULL decode routine replay every decode step."""
    with cpu_engine(
        models["target"], models["blend.1"], 2, cudagraph_mode=mode, uniform_request_counts=[5]
    ) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(9)), strict=True):
            expect(out, by_oracle(oracles, "blend.1", prompt, 2, 9))
        if mode != "PIECEWISE":
            assert full_steps(engine) >= out.stats.steps > 0


def test_mode_enum_and_string_are_the_same_argument(models):
    import specdec

    with cpu_engine(models["target"], None, 0, cudagraph_mode=specdec.CUDAGraphMode.NONE) as engine:
        engine.generate(PROMPTS[0], greedy(3))
        assert set(engine.stats().steps_by_mode) <= {"FULL", "PIECEWISE", "NONE"}
        assert full_steps(engine) == 0
        assert engine.graph_table() == []
