"""An EAGLE-3 head on a real GPU: P1 with counts, bit for bit in bfloat16, FULL graphs alone."""

import pytest
import torch
from compilations import forget_compiled_kernels, noted_compilations
from eagle_heads import make_head, whispering
from eagle_oracle import EagleOracle, speculate
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from oracle import Oracle

import specdec

pytestmark = pytest.mark.gpu

EVEN = list(range(0, 300, 2))
HEADS = {
    "shared": {"own_head": False, "feature_layers": [0, 2, 3]},
    "reduced": {"draft_ids": EVEN, "own_embedding": True, "norm_before_residual": False},
    "parallel": {"parallel": True, "draft_ids": EVEN},
}
NUM_PROMPTS = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Head size 64 and a group of three: the shape of the bundled model, and real tiles."""
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    return str(whispering(tmp_path_factory.mktemp("target"), std=0.15, loud=0.01, **shape))


@pytest.fixture(scope="module")
def heads(tmp_path_factory, target):
    root = tmp_path_factory.mktemp("heads")
    return {name: str(make_head(target, root / name, **options)) for name, options in HEADS.items()}


def gpu_engine(target, draft, k=4, **options):
    defaults = {
        "device": "cuda",
        "max_num_seqs": 16,
        "max_model_len": 512,
        "num_kv_blocks": 600,
        "kv_block_size": 16,
        "uniform_request_counts": [1, 4, 16],
    }
    if options.get("max_num_seqs"):
        del defaults["uniform_request_counts"]
    return specdec.Engine(target, draft, k, **(defaults | options))


def texts():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 120, (NUM_PROMPTS,), generator=generator).tolist()
    return [torch.randint(300, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("name", HEADS)
def test_float32_counts_are_the_oracle_s(target, heads, name, mode):
    """A stale hidden state or a key of a rejected draft changes the counts, if not the text."""
    oracle = EagleOracle(Oracle(target), target, heads[name])
    for k in (1, 4, 7):
        with gpu_engine(
            target, f"eagle:{heads[name]}", k, dtype="float32", cudagraph_mode=mode
        ) as engine:
            for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(24)), strict=True):
                expected = speculate(oracle, prompt, k=k, max_new_tokens=24)
                certain = expected.num_certain
                assert out.token_ids[:certain] == expected.token_ids[:certain]
                if certain == 24:
                    assert out.stats.drafted_per_step == expected.drafted
                    assert out.stats.accepted_per_step == expected.accepted
            if mode != "NONE":
                assert_decodes_replayed(engine)
            assert_no_leak(engine)


def drawn(engine, prompts, arrival):
    """Texts and counts of greedy and seeded requests; ``arrival``: steps between two."""
    requests = []
    waiting = list(enumerate(prompts))
    while waiting or any(request.finish_reason is None for request in requests):
        count = len(waiting) if arrival == 0 else 1
        for i, prompt in waiting[:count]:
            sampled = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": i} if i % 2 else {}
            requests += engine.add_request(prompt, greedy(80, **sampled))
        waiting = waiting[count:]
        for _ in range(max(arrival, 1)):
            engine.step()
    return [(r.output_ids, r.stats.accepted_per_step) for r in requests]


@pytest.mark.parametrize("name", HEADS)
def test_bfloat16_is_bit_for_bit_whatever_runs_beside(target, heads, name):
    """Text is that without a drafter, counts are those of the request alone.

    In float32 sums of fixed order a row does not depend on its batch, so nothing may differ: not
    by arrival, chunk size, batch or graphs.
    """
    prompts = texts()
    with gpu_engine(target, None, 0, dtype="bfloat16") as engine:
        plain = [ids for ids, _ in drawn(engine, prompts, 0)]
    draft = f"eagle:{heads[name]}"
    with gpu_engine(target, draft, dtype="bfloat16", enable_prefix_caching=False) as engine:
        alone = [drawn(engine, prompts[: i + 1], 0)[-1] for i in (0, 1)]
        together = drawn(engine, prompts, 0)
        assert [ids for ids, _ in together] == plain
        assert together[:2] == alone
        assert drawn(engine, prompts, 3) == together
        accepted = sum(sum(counts) for _, counts in together)
        steps = sum(len(counts) for _, counts in together)
        print(f"{name}: {accepted} drafts accepted in {steps} steps")
        assert accepted > 0.05 * steps
        assert_decodes_replayed(engine)
        assert_no_leak(engine)
    for options in (
        {"max_num_batched_tokens": 80},
        {"cudagraph_mode": "NONE"},
        {"num_kv_blocks": 40},
        {"enable_prefix_caching": True},
    ):
        defaults = {"dtype": "bfloat16", "enable_prefix_caching": False}
        with gpu_engine(target, draft, **(defaults | options)) as engine:
            assert drawn(engine, prompts, 2) == together, options
            if options.get("enable_prefix_caching"):
                # All prompts again, from cached blocks.
                assert drawn(engine, prompts, 0) == together
                assert engine._scheduler.num_cached_tokens > 0
            assert_no_leak(engine)


@pytest.mark.parametrize("name", ["reduced", "parallel"])
def test_rows_without_drafts_catch_up(target, heads, name):
    """k = 4, 0, 0, 0, 4, ... by row in bfloat16: a step of k accepts what a run of k = 4 would."""
    prompts = texts()[:6]
    with gpu_engine(target, f"eagle:{heads[name]}", dtype="bfloat16") as engine:
        whole = engine.generate(prompts, greedy(60))
        requests = [engine.add_request(prompt, greedy(60))[0] for prompt in prompts]
        step = 0
        while any(request.finish_reason is None for request in requests):
            for i, request in enumerate(requests):
                request.k = 4 if (step + i) % 5 in (0, 1) else 0
                if request.row >= 0:
                    engine._runner.write_k([request.row], [request.k])
            engine.step()
            step += 1
        proposed = {}
        for prompt, request, out in zip(prompts, requests, whole, strict=True):
            assert request.output_ids == out.token_ids
            at = len(prompt) + 1
            for drafted, accepted in zip(
                out.stats.drafted_per_step, out.stats.accepted_per_step, strict=True
            ):
                proposed[id(out), at] = (drafted, accepted)
                at += accepted + 1
        same = 0
        for prompt, request, out in zip(prompts, requests, whole, strict=True):
            at = len(prompt) + 1
            stats = request.stats
            for drafted, accepted in zip(
                stats.drafted_per_step, stats.accepted_per_step, strict=True
            ):
                if drafted == 4 and (id(out), at) in proposed:
                    assert (drafted, accepted) == proposed[id(out), at]
                    same += 1
                at += accepted + 1
        assert same > 20
        assert_decodes_replayed(engine)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_is_compiled_after_start_up(target, heads, name):
    """Mixed greedy traffic of every number of requests, with a row that must catch up."""
    # Other tests of this process have compiled the same kernels: start with none.
    forget_compiled_kernels()
    with (
        noted_compilations() as names,
        gpu_engine(target, f"eagle:{heads[name]}", dtype="bfloat16", max_num_seqs=8) as engine,
    ):
        at_start = len(names)
        assert at_start > 0
        for num_reqs in range(1, 9):
            prompts = texts()[:num_reqs]
            engine.generate(prompts, [greedy(9 + i, k=(4, 0, 2)[i % 3]) for i in range(num_reqs)])
        for request in [engine.add_request(prompt, greedy(40))[0] for prompt in texts()[:3]]:
            request.k = 0
        while engine._scheduler.has_work:
            for request in engine._scheduler.running:
                request.k = 4 if request.stats.steps > 20 else 0
                engine._runner.write_k([request.row], [request.k])
            engine.step()
        assert names[at_start:] == []
