"""P1, P3, P9: random traffic; every request equals its solo run and no block is lost.

The schedules are seeded: a failure names the seed that repeats it.
"""

import random

import pytest
from harness import assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import expect, speculate

NUM_SCHEDULES = 20
# k, draft, engine options: pools from ample to one that holds two texts at a time.
TRAFFIC = {
    "ample": (4, "blend.1", {"num_kv_blocks": 80, "max_num_seqs": 4}),
    "waiting": (3, "blend.3", {"num_kv_blocks": 16, "max_num_seqs": 4}),
    "tight": (4, "blend.1", {"num_kv_blocks": 11, "max_num_seqs": 4}),
    "eager": (7, "same", {"num_kv_blocks": 12, "max_num_seqs": 3, "cudagraph_mode": "NONE"}),
    "layer_skip": (2, "layer_skip:1", {"num_kv_blocks": 14, "max_num_seqs": 4}),
    "ngram": (4, "ngram", {"num_kv_blocks": 14, "max_num_seqs": 4}),
    "chunked": (4, "blend.1", {"num_kv_blocks": 24, "max_num_batched_tokens": 20,
                               "max_num_seqs": 4}),
    "read late": (4, "blend.1", {"num_kv_blocks": 14, "max_num_seqs": 4, "async_scheduling": True}),
    "small blocks": (4, "blend.1", {"num_kv_blocks": 50, "kv_block_size": 1, "max_num_seqs": 4}),
    "rounds": (2, "blend.1", {"num_kv_blocks": 14, "max_num_seqs": 4, "steps_per_replay": 4}),
    "rounds, read late": (3, "layer_skip:1", {"num_kv_blocks": 30, "max_num_seqs": 4,
                                              "steps_per_replay": 2, "async_scheduling": True}),
}  # fmt: skip


@pytest.fixture(scope="module", params=TRAFFIC)
def traffic(request, models):
    k, draft, options = TRAFFIC[request.param]
    rungs = {} if "cudagraph_mode" in options else {"uniform_request_counts": [2, 4]}
    with cpu_engine(
        models["target"], models.get(draft, draft), k, max_model_len=40, **options, **rungs
    ) as engine:
        yield k, draft, engine
        engine.check_integrity()
        if rungs:
            assert_decodes_replayed(engine)
        rounds = {record.rounds for record in engine.recent_steps(10_000)}
        assert rounds == {1, options.get("steps_per_replay", 1)}


RULES = [
    {"presence_penalty": 0.6, "frequency_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"logit_bias": {3: 4.0, 90: -100.0}},
    {"bad_words": [[17], [4, 5], [82]]},
    {"min_tokens": 1, "stop_token_ids": [3, 44, 82, 120]},
    {"stop_token_ids": list(range(40, 90))},
    {"logprobs": 2},
]


def random_requests(chosen, k, count):
    """Prompts of 1 to 14 tokens, some of few distinct ids so that lookups match."""
    requests = []
    for _ in range(count):
        ids = chosen.choice([range(128), range(4)])
        prompt = [chosen.choice(ids) for _ in range(chosen.randint(1, 14))]
        fields = {"k": chosen.choice([None, None, 0, 1, k])}
        if chosen.random() < 0.3:
            fields |= {"temperature": chosen.choice([0.5, 1.0]), "seed": chosen.randrange(2**64)}
            fields |= chosen.choice([{}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1}])
        if chosen.random() < 0.3:
            fields |= chosen.choice(RULES)
        fields |= {"priority": chosen.choice([0, 0, 1, -1])}
        requests.append((prompt, greedy(chosen.randint(1, 22), **fields)))
    return requests


@pytest.fixture(scope="module")
def solo(models):
    """The text of one request alone, without a drafter and without graphs."""
    with cpu_engine(models["target"], None, max_model_len=40, cudagraph_mode="NONE") as engine:
        yield lambda prompt, params: engine.generate(prompt, params).token_ids


def check(oracles, solo, draft, engine_k, prompt, params, found):
    plain = greedy()
    names = {"temperature", *(name for rule in RULES for name in rule)}
    if any(getattr(params, name) != getattr(plain, name) for name in names):
        ids = found if isinstance(found, list) else found.token_ids
        assert ids == solo(prompt, params)
        return
    expected = speculate(
        oracles["target"],
        oracles.get(draft),
        prompt,
        k=engine_k if params.k is None else params.k,
        max_new_tokens=params.max_new_tokens,
        max_model_len=40,
    )
    if isinstance(found, list):
        certain = expected.num_certain
        assert found[:certain] == expected.token_ids[:certain]
        assert len(found) == len(expected.token_ids)
    else:
        expect(found, expected, counts=draft != "ngram")


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_batches(traffic, oracles, solo, seed):
    """All at once: waiting, joining, leaving and preemption are the scheduler's own."""
    k, draft, engine = traffic
    requests = random_requests(random.Random(seed), k, 5)
    prompts, params = map(list, zip(*requests, strict=True))
    for (prompt, own), out in zip(requests, engine.generate(prompts, params), strict=True):
        check(oracles, solo, draft, k, prompt, own, out)
    assert_no_leak(engine)


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_arrivals_and_aborts(traffic, oracles, solo, seed):
    """Requests come while others run, are read at uneven speed, and some are aborted."""
    k, draft, engine = traffic
    chosen = random.Random(1000 + seed)
    waiting = random_requests(chosen, k, 4)
    running, done = [], []
    while waiting or running:
        if waiting and (not running or chosen.random() < 0.3):
            prompt, params = waiting.pop()
            running.append([prompt, params, engine.stream(prompt, params), [], None])
        entry = chosen.choice(running)
        event = next(entry[2], None)
        if event is not None:
            entry[3] += event.token_ids
            entry[4] = event.finish_reason
            if chosen.random() < 0.03:
                engine.abort(event.request_id)
        else:
            running.remove(entry)
            done.append(entry)
    for prompt, params, _, ids, reason in done:
        if reason == "abort":
            assert ids == solo(prompt, params)[: len(ids)]
        else:
            stopped = ids[-1] in (params.stop_token_ids or ())
            assert reason == ("stop" if stopped else "length")
            check(oracles, solo, draft, k, prompt, params, ids)
    assert_no_leak(engine)


def test_generate_among_open_streams(traffic, oracles, solo):
    """A blocking call finishes its own requests while a half-read stream stays half-read."""
    k, draft, engine = traffic
    prompt, params = [3, 1, 4], greedy(20)
    stream = engine.stream(prompt, params)
    ids = list(next(stream).token_ids)
    for seed in range(3):
        for own, other in random_requests(random.Random(seed), k, 2):
            check(oracles, solo, draft, k, own, other, engine.generate(own, other))
    ids += [token for event in stream for token in event.token_ids]
    check(oracles, solo, draft, k, prompt, params, ids)
    assert_no_leak(engine)


def test_a_request_that_fits_alone_always_finishes(models, oracles):
    """8 + 24 tokens fill a pool of exactly eight blocks of four; a second one waits for it."""
    prompts = [[9, 2, 77, 31, 5, 60, 8, 14], [4, 4, 4, 4, 90, 17, 3, 66]]
    with cpu_engine(
        models["target"], models["blend.1"], 4, num_kv_blocks=8, max_num_seqs=2, max_model_len=32
    ) as engine:
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(24)), strict=True):
            expect(
                out,
                speculate(oracles["target"], oracles["blend.1"], prompt, k=4, max_new_tokens=24),
            )
        assert_no_leak(engine)
