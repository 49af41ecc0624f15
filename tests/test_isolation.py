"""P3 and P9: neighbours, padding and earlier owners of a block change nothing; nothing leaks."""

import gc
import random
import weakref

import pytest
import torch
from harness import PROMPTS, assert_no_leak, caches_of, cpu_engine, greedy
from oracle import expect, speculate

CANARY = 12345.0
FOUR_AND_EIGHT = {"max_num_seqs": 8, "uniform_request_counts": [4, 8]}


def by_oracle(oracles, draft, prompt, k, max_new_tokens, **limits):
    return speculate(
        oracles["target"],
        oracles.get(draft),
        prompt,
        k=k,
        max_new_tokens=max_new_tokens,
        **limits,
    )


@pytest.mark.parametrize("draft", ["blend.1", "layer_skip:1"])
def test_every_neighbourhood_gives_the_solo_result(engines, models, oracles, draft):
    engine = engines(models["target"], models.get(draft, draft), 4, **FOUR_AND_EIGHT)
    shuffled = random.Random(0)
    for num_reqs in (2, 3, 4, 5, 8):
        prompts = [shuffled.choice(PROMPTS) for _ in range(num_reqs)]
        params = [greedy(shuffled.randint(1, 24)) for _ in range(num_reqs)]
        outs = engine.generate(prompts, params)
        for prompt, own, out in zip(prompts, params, outs, strict=True):
            expect(out, by_oracle(oracles, draft, prompt, 4, own.max_new_tokens))
    assert_no_leak(engine)


def test_more_requests_than_rows_wait_their_turn(engines, models, oracles):
    engine = engines(models["target"], models["blend.3"], 4, **FOUR_AND_EIGHT)
    prompts = [PROMPTS[i % 5] for i in range(21)]
    params = [greedy(5 + i % 11) for i in range(21)]
    outs = engine.generate(prompts, params)
    for prompt, own, out in zip(prompts, params, outs, strict=True):
        expect(out, by_oracle(oracles, "blend.3", prompt, 4, own.max_new_tokens))
    assert_no_leak(engine)


@pytest.mark.parametrize("num_reqs", [3, 5])
@pytest.mark.parametrize("poison", [float("nan"), CANARY])
def test_padding_rows_write_nothing_and_read_nothing(models, oracles, num_reqs, poison):
    """C26: three live rows padded to four, five to eight, in a pool they fill to the last block.

    Every slot of both caches is poisoned first. Only the positions of live rows may change, and
    neither NaN nor the canary may reach a result through a masked key.
    """
    prompts = [PROMPTS[i] for i in (0, 3, 2, 0, 3)][:num_reqs]
    length, block = 24, 4
    needed = sum(-(-(len(prompt) + length) // block) for prompt in prompts)
    with cpu_engine(
        models["target"], models["blend.1"], 4, num_kv_blocks=needed, **FOUR_AND_EIGHT
    ) as engine:
        caches = caches_of(engine)
        assert len(caches) == 2
        for cache in caches:
            cache.data.fill_(poison)
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(length)), strict=True):
            expect(out, by_oracle(oracles, "blend.1", prompt, 4, length))
        live = sum(len(prompt) + length for prompt in prompts)
        for cache in caches:
            pool = cache.data[:, :, :-1].flatten(-2)
            untouched = pool.isnan() if poison != poison else pool == poison
            changed = int((~untouched).all(-1)[0, 0].sum())
            # The last token of a text is written by no step, rejected drafts lie within the text.
            assert live - num_reqs - 5 * num_reqs <= changed <= live
            assert int((~untouched).any(-1)[0, 0].sum()) == changed
        assert_no_leak(engine)


def test_what_an_earlier_owner_left_in_a_block_is_never_read(models, oracles):
    """A poisoned text fills every block; the next owners start from their own positions."""
    with cpu_engine(
        models["target"], models["blend.1"], 4, num_kv_blocks=30, **FOUR_AND_EIGHT
    ) as engine:
        engine.generate([PROMPTS[4]] * 2, greedy(30))
        for cache in caches_of(engine):
            cache.data.fill_(float("nan"))
        for prompts in ([PROMPTS[2]], PROMPTS[:3], [PROMPTS[1]]):
            for prompt, out in zip(prompts, engine.generate(prompts, greedy(9)), strict=True):
                expect(out, by_oracle(oracles, "blend.1", prompt, 4, 9))


def test_same_request_twice_and_after_others(engines, models, oracles):
    engine = engines(models["target"], models["blend.3"], 4, **FOUR_AND_EIGHT)
    expected = by_oracle(oracles, "blend.3", PROMPTS[3], 4, 16)
    for others in (0, 3, 7):
        outs = engine.generate([PROMPTS[3]] + [PROMPTS[4]] * others, greedy(16))
        expect(outs[0], expected)


def test_seeded_sampling_without_a_drafter_ignores_its_neighbours(engines, models):
    """Alone, first, last, among greedy rows: the seed's text."""
    engine = engines(models["target"], None, 0, **FOUR_AND_EIGHT)
    own = greedy(24, temperature=0.8, seed=42)
    alone = engine.generate(PROMPTS[3], own).token_ids
    hot = greedy(24, temperature=1.5)
    for place in (0, 2, 5):
        prompts = [PROMPTS[i % 5] for i in range(6)]
        params = [hot if i % 2 else greedy(10 + i) for i in range(6)]
        prompts[place], params[place] = PROMPTS[3], own
        assert engine.generate(prompts, params)[place].token_ids == alone


def test_abort_returns_the_blocks(engines, models, oracles):
    engine = engines(models["target"], models["blend.1"], 4, **FOUR_AND_EIGHT)
    aborted, kept = (engine.stream(prompt, greedy(40)) for prompt in (PROMPTS[4], PROMPTS[3]))
    first = next(aborted)
    ids = list(next(kept).token_ids)
    engine.abort(first.request_id)
    rest = list(aborted)
    assert rest[-1].finish_reason == "abort"
    ids += [token for event in kept for token in event.token_ids]
    assert ids == oracles["target"].greedy(PROMPTS[3], 40)[0]
    assert_no_leak(engine)


def test_dropping_a_stream_frees_its_request(engines, models):
    """A caller that goes away must not hold its row for ever."""
    engine = engines(models["target"], models["blend.1"], 4, **FOUR_AND_EIGHT)
    events = engine.stream(PROMPTS[0], greedy(80))
    next(events)
    events.close()
    del events
    gc.collect()
    engine.generate(PROMPTS[1], greedy(4))
    assert_no_leak(engine)


def test_memory_stays_flat_over_many_requests(engines, models):
    """P9: after warm-up neither tensors, graphs nor blocks grow with the number of requests."""
    engine = engines(models["target"], models["blend.1"], 4, **FOUR_AND_EIGHT)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())

    def serve(rounds: int) -> None:
        for i in range(rounds):
            engine.generate([PROMPTS[(i + j) % 5] for j in range(6)], greedy(3 + i % 3))

    serve(4)
    graphs = len(engine.graph_table())
    num_bytes = sum(row.num_bytes for row in engine.graph_table())
    before = tensors()
    serve(12)
    assert tensors() <= before + 20
    assert len(engine.graph_table()) == graphs
    assert sum(row.num_bytes for row in engine.graph_table()) == num_bytes
    assert_no_leak(engine)


def test_a_closed_engine_is_freed(models):
    engine = cpu_engine(models["target"], models["same"], 2, uniform_request_counts=[5])
    engine.generate(PROMPTS[0], greedy(4))
    seen = [weakref.ref(cache.data) for cache in caches_of(engine)]
    engine.close()
    del engine
    gc.collect()
    assert [ref() for ref in seen] == [None, None]
