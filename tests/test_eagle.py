"""P1 with an EAGLE-3 head: the text without a drafter, and the counts of a head without a cache.

A head that reads stale hidden states, or keys of drafts that were rejected, changes no token: only
the numbers of accepted drafts tell.
"""

import pytest
import torch
from adapters import merged, write_adapter
from eagle_heads import make_head, whispering
from eagle_oracle import EagleOracle, speculate
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, caches_of, cpu_engine, greedy
from oracle import CLOSE_CALL, Oracle, expect

ONE_RUNG = {"uniform_request_counts": [5]}
EVEN = list(range(0, 128, 2))
HEADS: dict[str, dict] = {
    "shared": {"own_head": False, "feature_layers": [0, 2, 3]},
    "reduced": {"draft_ids": [*EVEN, 1, 3, 5, 7], "own_embedding": True, "noise": 0.15},
    "plain stream": {"norm_before_residual": False, "feature_layers": [3, 1, 2]},
    "speculators": {"layout": "speculators", "seed": 3, "draft_ids": EVEN, "own_head": False},
    "parallel": {"parallel": True, "seed": 5},
    "parallel reduced": {"parallel": True, "draft_ids": EVEN, "norm_before_residual": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(whispering(tmp_path_factory.mktemp("whispering")))


@pytest.fixture(scope="module")
def heads(tmp_path_factory, target):
    root = tmp_path_factory.mktemp("heads")
    return {name: str(make_head(target, root / name, **options)) for name, options in HEADS.items()}


@pytest.fixture(scope="module")
def oracles(target, heads):
    reference = Oracle(target)
    return {name: EagleOracle(reference, target, path) for name, path in heads.items()}


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize(
    ("name", "k"), [*((name, 4) for name in HEADS), ("shared", 1), ("parallel", 1), ("reduced", 7)]
)
def test_counts_are_the_oracle_s(engines, target, heads, oracles, mode, name, k):
    engine = engines(target, f"eagle:{heads[name]}", k, **mode)
    for num_reqs in (5, 2):
        prompts = PROMPTS[-num_reqs:]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy()), strict=True):
            expect(out, speculate(oracles[name], prompt, k=k, max_new_tokens=24))
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)
    assert_no_leak(engine)


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_right_now_and_then_and_read_the_target(oracles, name):
    """Counts that are always 0 or k, or that do not hang on the hidden states, prove nothing."""
    runs = [speculate(oracles[name], prompt, k=4, max_new_tokens=40) for prompt in PROMPTS]
    accepted = sum(sum(run.accepted) for run in runs)
    drafted = sum(sum(run.drafted) for run in runs)
    assert 0.03 < accepted / drafted < 0.8
    assert len({count for run in runs for count in run.accepted}) >= 2
    certain = [run.num_certain == 40 for run in runs]
    assert sum(certain) >= 3

    def guesses(shift: int) -> list[list[int]]:
        found = []
        for prompt, run in zip(PROMPTS, runs, strict=True):
            text = [*prompt, *run.token_ids]
            features = oracles[name].features(text).roll(shift, 0)
            lengths = range(len(prompt) + 1, len(text))
            found += [oracles[name].propose(text[:n], features, 2)[0] for n in lengths]
        return found

    pairs = list(zip(guesses(0), guesses(1), strict=True))
    assert sum(mine != other for mine, other in pairs) > 0.1 * len(pairs)


def stepped(engine, prompts, schedules, max_new_tokens):
    """Run requests whose k changes from step to step: ``schedules`` by request."""
    requests = [engine.add_request(prompt, greedy(max_new_tokens))[0] for prompt in prompts]
    while any(request.finish_reason is None for request in requests):
        for request, schedule in zip(requests, schedules, strict=True):
            request.k = schedule[min(request.stats.steps, len(schedule) - 1)]
            if request.row >= 0:
                engine._runner.write_k([request.row], [request.k])
        engine.step()
    return [engine.generation([request]) for request in requests]


SCHEDULES = [
    [4, 0, 0, 0, 4, 0, 4, 4, 0, 0, 4],
    [0, 0, 0, 0, 0, 0, 0, 4, 4, 0, 4, 0, 0, 0, 4],
    [1, 4, 2, 0, 0, 3, 4, 1, 0, 4],
]


@pytest.mark.parametrize("name", ["reduced", "plain stream", "parallel"])
@pytest.mark.parametrize("rows", [[1], [0, 1, 2]], ids=str)
def test_k_changes_from_step_to_step(engines, target, heads, oracles, mode, name, rows):
    """Steps without drafts keep the hidden states that a row catches up from, alone or not."""
    engine = engines(target, f"eagle:{heads[name]}", 4, extra_k=[1], **mode)
    prompts = [PROMPTS[3 - row] for row in rows]
    schedules = [SCHEDULES[row] for row in rows]
    outs = stepped(engine, prompts, schedules, 30)
    for prompt, schedule, out in zip(prompts, schedules, outs, strict=True):
        expect(out, speculate(oracles[name], prompt, k=schedule, max_new_tokens=30))


@pytest.mark.parametrize("name", ["reduced", "parallel"])
@pytest.mark.parametrize("idle", [16, 17, 33])
def test_a_long_stretch_without_drafts_is_caught_up(engines, target, heads, oracles, name, idle):
    """The bulk pass reads 16 tokens of a row; one more or less must not be lost."""
    engine = engines(target, f"eagle:{heads[name]}", 4, **ONE_RUNG)
    schedule = [4, 4, *[0] * idle, 4]
    (out,) = stepped(engine, [PROMPTS[0]], [schedule], 30 + idle)
    expect(out, speculate(oracles[name], PROMPTS[0], k=schedule, max_new_tokens=30 + idle))
    assert sum(out.stats.drafted_per_step[2 + idle :]) > 20


@pytest.mark.parametrize("name", ["shared", "reduced", "parallel"])
def test_each_request_takes_its_own_k(engines, target, heads, oracles, mode, name):
    engine = engines(target, f"eagle:{heads[name]}", 4, **mode)
    params = [greedy(20 + k, k=k) for k in range(5)]
    outs = engine.generate(PROMPTS, params)
    for k, (prompt, out) in enumerate(zip(PROMPTS, outs, strict=True)):
        expect(out, speculate(oracles[name], prompt, k=k, max_new_tokens=20 + k))


@pytest.mark.parametrize("name", ["reduced", "parallel"])
@pytest.mark.parametrize("budget", [25, 80])
def test_prefill_in_chunks_beside_decoding_rows(engines, target, heads, oracles, name, budget):
    """The last token of a chunk is read with the first of the next one."""
    engine = engines(
        target,
        f"eagle:{heads[name]}",
        4,
        max_num_batched_tokens=budget,
        kv_block_size=8,
        uniform_request_counts=[5],
        cudagraph_mode="FULL_DECODE_ONLY",
    )
    prompts = [PROMPTS[0], PROMPTS[4] * 2, PROMPTS[1], PROMPTS[4] * 3, [64]]
    for prompt, out in zip(prompts, engine.generate(prompts, greedy(20)), strict=True):
        expect(out, speculate(oracles[name], prompt, k=4, max_new_tokens=20, max_model_len=96))


@pytest.mark.parametrize("name", ["reduced", "parallel"])
@pytest.mark.parametrize("late", [False, True], ids=["read at once", "read late"])
def test_preempted_rows_resume_with_the_same_counts(target, heads, oracles, name, late):
    """C36: a resumed text is read anew; no draft and no hidden state of before is left over."""
    with cpu_engine(
        target,
        f"eagle:{heads[name]}",
        4,
        num_kv_blocks=14,
        max_num_seqs=4,
        async_scheduling=late,
        uniform_request_counts=[4],
    ) as engine:
        prompts = [PROMPTS[i] for i in (0, 3, 1, 2, 3, 0)]
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(24)), strict=True):
            expect(out, speculate(oracles[name], prompt, k=4, max_new_tokens=24))
        assert engine.stats().preemptions > 0
        engine.check_integrity()
        assert_no_leak(engine)


@pytest.mark.parametrize("name", ["reduced", "parallel"])
def test_cached_blocks_hold_what_the_head_needs(target, heads, oracles, name):
    """C38: a text that goes on from another's prompt and output has the counts of a cold one."""
    with cpu_engine(target, f"eagle:{heads[name]}", 4, **ONE_RUNG) as engine:
        for k, length in ((4, 25), (4, 26), (0, 30)):
            # Another first token, so that nothing but this text's own blocks is there.
            prompt = [length, *PROMPTS[3]]
            first = engine.generate(prompt, greedy(length, k=k))
            longer = [*prompt, *first.token_ids, 5, 17]
            before = engine._scheduler.num_cached_tokens
            out = engine.generate(longer, greedy(24))
            assert engine._scheduler.num_cached_tokens > before
            expect(out, speculate(oracles[name], longer, k=4, max_new_tokens=24))


def test_published_blocks_are_those_of_a_text_read_at_once(target, heads):
    """What a finished text leaves: keys, values and hidden states of verified tokens alone."""
    options = {"num_kv_blocks": 24, "max_num_seqs": 1, "cudagraph_mode": "NONE"}
    draft = f"eagle:{heads['plain stream']}"
    compared = accepted_last = 0
    for length in range(20, 32):
        with (
            cpu_engine(target, draft, 4, **options) as one,
            cpu_engine(target, draft, 4, **options) as other,
        ):
            out = one.generate(PROMPTS[3], greedy(length))
            accepted_last += out.stats.accepted_per_step[-1] > 0
            other.generate([*PROMPTS[3], *out.token_ids, *range(9)], greedy(1))
            found, wanted = (e._scheduler.pool._block_of for e in (one, other))
            assert found.keys() <= wanted.keys()
            for content, block in found.items():
                for mine, theirs in zip(caches_of(one), caches_of(other), strict=True):
                    assert torch.allclose(
                        mine.data[:, :, block], theirs.data[:, :, wanted[content]], atol=1e-4
                    )
                pages = [e.drafter.features.data.view(25, 4, -1) for e in (one, other)]
                assert torch.allclose(pages[0][block], pages[1][wanted[content]], atol=1e-4)
                compared += 1
    assert accepted_last > 2 and compared > 60


@pytest.mark.parametrize("name", ["reduced", "plain stream"])
def test_a_cached_block_is_shared_where_the_next_token_is_the_same(target, heads, oracles, name):
    """The head's key of a block's last token holds the next one: another next token, no hit."""
    prompt = PROMPTS[4][:16]
    with cpu_engine(target, f"eagle:{heads[name]}", 4, **ONE_RUNG) as engine:
        scheduler = engine._scheduler
        engine.generate([*prompt, 1, 2, 3, 4, 5], greedy(12))
        for tail, cached in (([1, 2, 3], 16), ([9, 2, 3], 12), ([1], 16), ([], 12)):
            before = scheduler.num_cached_tokens
            text = [*prompt, *tail]
            expect(
                engine.generate(text, greedy(20)),
                speculate(oracles[name], text, k=4, max_new_tokens=20),
            )
            assert scheduler.num_cached_tokens - before == cached


def test_what_lies_in_unused_pages_is_never_read(target, heads, oracles):
    """Padding rows, rejected drafts and earlier owners: keys and hidden states are poisoned."""
    for name in ("reduced", "parallel"):
        with cpu_engine(
            target, f"eagle:{heads[name]}", 4, num_kv_blocks=40, uniform_request_counts=[5]
        ) as engine:
            engine.generate(PROMPTS[4], greedy(30))
            caches = caches_of(engine)
            assert len(caches) == 2
            for cache in caches:
                cache.data.fill_(torch.nan)
            engine.drafter.features.data.fill_(torch.nan)
            for prompts in (PROMPTS[:3], [PROMPTS[3]]):
                for prompt, out in zip(prompts, engine.generate(prompts, greedy(20)), strict=True):
                    expect(out, speculate(oracles[name], prompt, k=4, max_new_tokens=20))


@pytest.mark.parametrize("name", ["shared", "parallel"])
def test_a_head_with_a_shorter_context_is_served(tmp_path, target, name):
    """Rows whose tokens no longer fit the head are drafted 0 and stay lossless."""
    head = make_head(
        target, tmp_path, **HEADS[name], config_overrides={"max_position_embeddings": 32}
    )
    oracle = EagleOracle(Oracle(target), target, head)
    with cpu_engine(target, f"eagle:{head}", 4, **ONE_RUNG) as engine:
        for prompt in (PROMPTS[4], PROMPTS[4] * 2):
            out = engine.generate(prompt, greedy(30))
            expect(out, speculate(oracle, prompt, k=4, max_new_tokens=30), counts=False)
            exact = speculate(oracle, prompt, k=4, max_new_tokens=30, max_draft_len=32)
            length = len(prompt) + 1
            steps = zip(
                out.stats.drafted_per_step, out.stats.accepted_per_step, exact.drafted, strict=False
            )
            for drafted, accepted, wanted in steps:
                if length + 4 > 32:
                    # Near the border a row may draft less than would fit.
                    assert drafted in (0, wanted)
                else:
                    assert drafted == wanted == 4
                length += accepted + 1
            assert out.stats.drafted_per_step[-3:] == [0, 0, 0]


def test_k_auto(target, heads, oracles):
    """Batches take the k of the moment; the text and what each step accepts stay the head's own."""
    with cpu_engine(target, f"eagle:{heads['reduced']}", "auto", k_max=4, **ONE_RUNG) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(30)), strict=True):
            steps = out.stats.drafted_per_step
            exact = speculate(oracles["reduced"], prompt, k=steps, max_new_tokens=30)
            expect(out, exact)


def test_one_target_in_two_engines(target, heads, oracles):
    """The head's hidden states are its own engine's: the same model drafts otherwise beside it."""
    from specdec.verifier.attention.sdpa import SdpaBackend
    from specdec.verifier.loading import load_model

    model = load_model(target, attention_backend=SdpaBackend("cpu"))
    with (
        cpu_engine(model, f"eagle:{heads['reduced']}", 4, **ONE_RUNG) as one,
        cpu_engine(model, "layer_skip:1", 4, **ONE_RUNG) as other,
    ):
        for prompt in PROMPTS[:2]:
            exact = speculate(oracles["reduced"], prompt, k=4, max_new_tokens=12)
            assert other.generate(prompt, greedy(12)).token_ids == exact.token_ids
            expect(one.generate(prompt, greedy(12)), exact)


@pytest.mark.parametrize("name", ["shared", "parallel"])
def test_rows_with_adapters_are_drafted_from_their_own_hidden_states(
    tmp_path, target, heads, oracles, mode, name
):
    """The head itself runs unadapted, on what the adapted target computed."""
    path = write_adapter(tmp_path / "a", target, seed=4, std=0.02)
    adapted = EagleOracle(merged(target, path), target, heads[name])
    with cpu_engine(target, f"eagle:{heads[name]}", 4, lora={"a": path}, **mode) as engine:
        for names in ([None, "a", "a"], [None, None, None], ["a", None, "a"]):
            outs = engine.generate(PROMPTS[:3], greedy(20), lora=list(names))
            for adapter, prompt, out in zip(names, PROMPTS, outs, strict=False):
                oracle = oracles[name] if adapter is None else adapted
                expect(out, speculate(oracle, prompt, k=4, max_new_tokens=20))


@pytest.mark.parametrize("name", ["reduced", "parallel"])
def test_lookup_before_a_head(target, heads, oracles, mode, name):
    """What lookup proposes is read as the head's own: the text is the target's, and no key of the
    head or hidden state is lost, so that a row without a match drafts as it does alone.
    """
    draft = f"ngram+eagle:{heads[name]}"
    compared = 0
    with cpu_engine(target, draft, 4, **mode) as engine:
        for prompts in (PROMPTS, [PROMPTS[4] * 2, PROMPTS[1]]):
            for prompt, out in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
                text = [*prompt, *out.token_ids]
                expect(out, speculate(oracles[name], prompt, k=4, max_new_tokens=30), counts=False)
                features = oracles[name].features(text)
                at = len(prompt) + 1
                counts = (out.stats.drafted_per_step, out.stats.accepted_per_step)
                for drafted, accepted in zip(*counts, strict=True):
                    matched = any(text[at - 5 : at] == text[i - 5 : i] for i in range(5, at))
                    if drafted and not matched:
                        guesses, margin = oracles[name].propose(text[:at], features, drafted)
                        ahead = zip(guesses, text[at:], strict=False)
                        hits = (*(guess == token for guess, token in ahead), False).index(False)
                        assert accepted == hits or margin < CLOSE_CALL
                        compared += 1
                    at += accepted + 1
        assert compared > 20
