"""P1, P3, P8 under preemption, prefix hits and chunked prefill: C36, C38, C40."""

import pytest
from harness import PROMPTS, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate

FOUR = {"uniform_request_counts": [4], "max_num_seqs": 4}
EIGHT_TOKENS = [PROMPTS[4][i : i + 8] for i in (0, 4, 9)]


def by_oracle(oracles, draft, prompt, k, max_new_tokens):
    return speculate(oracles["target"], oracles[draft], prompt, k=k, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("draft", ["same", "blend.1", "layer_skip:1"])
def test_preempted_in_mid_speculation(models, oracles, draft, mode):
    """C36: ten blocks of four for three texts of 32 tokens; one of them must step back, often."""
    with cpu_engine(
        models["target"], models.get(draft, draft), 4, num_kv_blocks=10, cudagraph_mode=mode, **FOUR
    ) as engine:
        for _ in range(2):
            outs = engine.generate(EIGHT_TOKENS, greedy(24))
            for prompt, out in zip(EIGHT_TOKENS, outs, strict=True):
                expect(out, by_oracle(oracles, draft, prompt, 4, 24))
            assert_no_leak(engine)


def test_preempted_sampled_texts_are_those_of_a_large_pool(models):
    """A seeded text is the same whether or not its request was preempted."""
    texts = []
    for blocks in (10, 100):
        with cpu_engine(
            models["target"], models["blend.1"], 4, num_kv_blocks=blocks, **FOUR
        ) as engine:
            params = [greedy(24, temperature=1.0, seed=seed) for seed in range(3)]
            texts.append([out.token_ids for out in engine.generate(EIGHT_TOKENS, params)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("draft", ["same", "blend.1", "layer_skip:1"])
def test_a_prefix_hit_keeps_text_and_acceptance(models, oracles, draft):
    """C38: only committed tokens are cached, and the draft's cache is part of the hit."""
    first = PROMPTS[3]
    with cpu_engine(models["target"], models.get(draft, draft), 4, **FOUR) as engine:
        for _ in range(2):
            expected = by_oracle(oracles, draft, first, 4, 24)
            expect(engine.generate(first, greedy(24)), expected)
            for cut in (len(expected.token_ids), 13, 7):
                second = [*first, *expected.token_ids[:cut], 17, 99]
                out = engine.generate(second, greedy(20))
                expect(out, by_oracle(oracles, draft, second, 4, 20))
        assert_no_leak(engine)


@pytest.mark.parametrize("lengths", [(15, 16, 17, 40), (40, 1, 16, 5)])
def test_chunks_mixed_with_verify_rows(models, oracles, lengths):
    """C40: prompts arrive in chunks of at most 16 while three requests decode with k=4."""
    source = [(29 * i + i * i) % 128 for i in range(64)]
    with cpu_engine(
        models["target"], models["blend.1"], 4, max_num_seqs=8, uniform_request_counts=[4, 8],
        max_num_batched_tokens=40,
    ) as engine:  # fmt: skip
        running = [engine.stream(prompt, greedy(40)) for prompt in PROMPTS[:3]]
        texts = [list(next(stream).token_ids) for stream in running]
        late = [engine.stream(source[:length], greedy(9)) for length in lengths]
        late_texts = [list(next(stream).token_ids) for stream in late]
        for stream, text in zip([*running, *late], [*texts, *late_texts], strict=True):
            text += [token for event in stream for token in event.token_ids]
        for prompt, text in zip(PROMPTS, texts, strict=False):
            assert text == oracles["target"].greedy(prompt, 40)[0]
        for length, text in zip(lengths, late_texts, strict=True):
            assert text == oracles["target"].greedy(source[:length], 9)[0]
        assert_no_leak(engine)


def test_a_budget_below_one_verify_batch_still_serves_everyone(models, oracles):
    """C40: eight tokens a step cannot hold four rows of 1+4; rows take turns, none starves."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, max_num_batched_tokens=8, **FOUR
    ) as engine:
        prompts = [*PROMPTS[:3], PROMPTS[4]]
        outs = engine.generate(prompts, greedy(20))
        for prompt, out in zip(prompts, outs, strict=True):
            expect(out, by_oracle(oracles, "blend.1", prompt, 4, 20))


def test_priority_orders_admission_and_preemption(models, oracles):
    """C36: a pool short of blocks takes them from the last in rank; nobody's text changes."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, max_num_seqs=3, num_kv_blocks=12
    ) as engine:
        first = engine.add_request(PROMPTS[0], greedy(24, priority=5))[0]
        engine.step()
        later = [engine.add_request(PROMPTS[i], greedy(24, priority=i))[0] for i in (1, 3)]
        ends = []
        while len(ends) < 3:
            engine.step()
            ends += [r for r in (first, *later) if r.finish_reason and r not in ends]
        assert ends[-1] is first and engine.stats().preemptions > 0
        for request in ends:
            text = oracles["target"].greedy(request.prompt_ids, 24)[0]
            assert request.output_ids == text
        assert_no_leak(engine)


def test_tokens_carry_their_times(models):
    with cpu_engine(models["target"], models["same"], 4) as engine:
        events = list(engine.stream(PROMPTS[0], greedy(20)))
        times = [time for event in events for time in event.times]
        assert len(times) == sum(len(event.token_ids) for event in events) == 20
        assert times == sorted(times) and len(set(times)) == len(events)
