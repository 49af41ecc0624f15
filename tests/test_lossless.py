"""P1: greedy text with any drafter, k and batch is the text without one, token for token.

The reference is transformers' own model, and the number of accepted tokens of every step is
compared too: a drafter that is fed wrong positions still gives lossless text, only slowly.
"""

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from tiny import blended, make_tiny, negated

DRAFTS = ["same", "negated", "blend.1", "blend.3"]
# One graph of five rows serves every batch of one to five requests.
ONE_RUNG = {"uniform_request_counts": [5]}


def expected_of(oracles, name, prompt, k, max_new_tokens=24, **limits):
    draft = oracles.get(name)
    return speculate(oracles["target"], draft, prompt, k=k, max_new_tokens=max_new_tokens, **limits)


@pytest.fixture(params=["graphs", "eager"])
def mode(request):
    return ONE_RUNG if request.param == "graphs" else {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize("num_reqs", [1, 3, 5])
@pytest.mark.parametrize("k", [1, 2, 4, 7])
@pytest.mark.parametrize("name", DRAFTS)
def test_draft_model(engines, models, oracles, mode, name, k, num_reqs):
    engine = engines(models["target"], models[name], k, **mode)
    prompts = PROMPTS[-num_reqs:]
    for prompt, out in zip(prompts, engine.generate(prompts, greedy()), strict=True):
        expect(out, expected_of(oracles, name, prompt, k))
    if mode is ONE_RUNG:
        assert_decodes_replayed(engine)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_layer_skip(engines, models, oracles, mode, k):
    engine = engines(models["target"], "layer_skip:1", k, **mode)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy()), strict=True):
        expect(out, expected_of(oracles, "layer_skip:1", prompt, k))


@pytest.mark.parametrize("k", [1, 4, 7])
def test_ngram(engines, models, oracles, mode, k):
    """Which n-grams are tried is the drafter's own affair, so its counts are only bounded."""
    engine = engines(models["target"], "ngram", k, **mode)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(48)), strict=True):
        expect(out, expected_of(oracles, None, prompt, k, 48), counts=False)
        committed = 1
        stats = out.stats
        for drafted, accepted in zip(stats.drafted_per_step, stats.accepted_per_step, strict=True):
            assert 0 <= accepted <= drafted <= min(k, 48 - committed - 1)
            committed += accepted + 1
        assert committed == 48


def test_no_drafter_ignores_k(engines, models, oracles, mode):
    engine = engines(models["target"], None, 4, **mode)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy()), strict=True):
        expect(out, expected_of(oracles, None, prompt, 4))


def test_each_request_takes_its_own_k(engines, models, oracles, mode):
    """Rows with a smaller k ride in the same uniform batch; their tails are not drafts."""
    engine = engines(models["target"], models["blend.1"], 4, **mode)
    own_k = [0, 1, 2, 3, 4]
    params = [greedy(20 + k, k=k) for k in own_k]
    for prompt, k, out in zip(PROMPTS, own_k, engine.generate(PROMPTS, params), strict=True):
        expect(out, expected_of(oracles, "blend.1", prompt, k, 20 + k))


def test_k_none_is_the_k_of_the_engine(engines, models, oracles, mode):
    engine = engines(models["target"], models["same"], 2, **mode)
    out = engine.generate(PROMPTS[0], greedy(11, k=None))
    expect(out, expected_of(oracles, "same", PROMPTS[0], 2, 11))


@pytest.mark.parametrize("seed", range(10))
def test_random_models(tmp_path, seed):
    """Other geometries: group sizes 1, 2, 3, odd head sizes, tied heads, several layers."""
    heads, kv_heads = [(4, 2), (4, 4), (3, 1), (6, 2), (2, 1)][seed % 5]
    target = make_tiny(
        tmp_path / "target",
        seed=100 + seed,
        layers=1 + seed % 3,
        hidden=[64, 64, 96, 96, 64][seed % 5],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=[16, 8, 24][seed % 3],
        vocab=[128, 200][seed % 2],
        tie=seed % 4 == 3,
    )
    draft = blended(target, tmp_path / "draft", 0.2, seed=seed)
    k = [1, 2, 4, 7][seed % 4]
    graphs = seed % 2 == 0
    options = {"uniform_request_counts": [3]} if graphs else {"cudagraph_mode": "NONE"}
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(0, 128, (length,), generator=generator).tolist() for length in (2, 1 + k, 19)
    ]
    reference, proposer = Oracle(target), Oracle(draft)
    with cpu_engine(str(target), str(draft), k, max_num_seqs=3, **options) as engine:
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(20)), strict=True):
            expect(out, speculate(reference, proposer, prompt, k=k, max_new_tokens=20))


def test_a_smaller_draft_of_another_geometry(tmp_path, models, oracles, mode):
    """Nothing of the target's shape may be taken for the draft's: layers, heads, head size."""
    draft = make_tiny(
        tmp_path / "draft", seed=9, layers=1, hidden=32, heads=2, kv_heads=1, head_dim=8, ffn=48
    )
    proposer = Oracle(draft)
    with cpu_engine(models["target"], str(draft), 3, **mode) as engine:
        for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy(16)), strict=True):
            expected = speculate(oracles["target"], proposer, prompt, k=3, max_new_tokens=16)
            expect(out, expected)


def test_acceptance_of_none_some_and_all_in_one_text(engines, models, oracles, mode):
    """C02: the next step starts right after what was committed, whatever that was."""
    engine = engines(models["target"], models["blend.1"], 4, **mode)
    prompt = PROMPTS[3]
    expected = expected_of(oracles, "blend.1", prompt, 4, 60)
    # The input must drive all three, or the case tests nothing.
    assert {0, 4} < set(expected.accepted)
    expect(engine.generate(prompt, greedy(60)), expected)


@pytest.mark.parametrize("draft", ["blend.1", "ngram"])
def test_positions_of_every_verify_pass(models, monkeypatch, draft):
    """C02: the first position is that of the newest committed token; the others follow it."""
    from specdec.verifier.models.llama import CausalLM

    passes = []
    forward = CausalLM.forward

    def recorded(self, input_ids, positions, *args, **kwargs):
        passes.append((len(input_ids), positions.tolist()))
        return forward(self, input_ids, positions, *args, **kwargs)

    monkeypatch.setattr(CausalLM, "forward", recorded)
    prompt = PROMPTS[3]
    with cpu_engine(models["target"], models.get(draft, draft), 4, cudagraph_mode="NONE") as engine:
        out = engine.generate(prompt, greedy(40))
    # The draft's own passes hold one or two tokens, the prefill as many as the prompt.
    verified = [positions for num_tokens, positions in passes if num_tokens == 5]
    committed, expected = 1, []
    steps = zip(out.stats.drafted_per_step, out.stats.accepted_per_step, strict=True)
    for _, accepted in steps:
        expected.append(len(prompt) + committed - 1)
        committed += accepted + 1
    # The last step may have nothing to draft, and then runs at query length 1.
    assert len(expected) - len(verified) in (0, 1)
    for first, positions in zip(expected, verified, strict=False):
        assert positions == list(range(first, first + 5))


def test_text_of_a_long_request_crosses_many_blocks(engines, models, oracles, mode):
    engine = engines(models["target"], models["blend.3"], 4, **mode)
    expect(
        engine.generate(PROMPTS[4], greedy(200)),
        expected_of(oracles, "blend.3", PROMPTS[4], 4, 200, max_model_len=96),
    )


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_block_size_changes_nothing(engines, models, oracles, block_size):
    engine = engines(models["target"], models["blend.1"], 4, kv_block_size=block_size, **ONE_RUNG)
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, greedy()), strict=True):
        expect(out, expected_of(oracles, "blend.1", prompt, 4))


@pytest.mark.parametrize("budget", [5, 16])
def test_prefill_in_small_chunks(engines, models, oracles, budget):
    """A prompt longer than the token budget of a step is read in pieces, drafts included."""
    engine = engines(
        models["target"], models["blend.1"], 4, max_num_batched_tokens=5 * budget, max_num_seqs=5
    )
    prompts = [PROMPTS[4] * 3, PROMPTS[0], PROMPTS[4] * 2]
    for prompt, out in zip(prompts, engine.generate(prompts, greedy()), strict=True):
        expect(out, expected_of(oracles, "blend.1", prompt, 4, max_model_len=96))


def test_a_draft_with_a_shorter_context_is_served(tmp_path, models, oracles):
    """Rows whose tokens no longer fit the draft are drafted 0 and stay lossless."""
    draft = make_tiny(tmp_path / "draft", seed=1, max_position=32)
    proposer = Oracle(draft)
    prompt = PROMPTS[4]
    with cpu_engine(models["target"], str(draft), 4, **ONE_RUNG) as engine:
        out = engine.generate(prompt, greedy(40))
    expect(out, expected_of(oracles, None, prompt, 4, 40), counts=False)
    expected = speculate(oracles["target"], proposer, prompt, k=4, max_new_tokens=40)
    committed = 1
    for step, drafted in enumerate(out.stats.drafted_per_step):
        length = len(prompt) + committed
        if length + 4 <= 32:
            assert drafted == expected.drafted[step]
            assert out.stats.accepted_per_step[step] == expected.accepted[step]
        if length > 32:
            assert drafted == 0
        committed += out.stats.accepted_per_step[step] + 1
    assert out.stats.drafted > 0


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """transformers' reading of the bundled model, and its first eight layers as a draft."""
    from reference import transformers_from_gguf

    from specdec.verifier.hub import resolve_model
    from specdec.verifier.loading import save_first_layers

    short = tmp_path_factory.mktemp("smollm2")
    save_first_layers(None, short, 8)
    return transformers_from_gguf(resolve_model(None)), str(short)


@pytest.mark.smollm2
@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "ngram", "layer_skip:8", "draft_model"])
def test_smollm2(smollm2, draft):
    """Every token is the greedy choice of a full forward pass of transformers' over the text.

    A margin below 1e-4 between the two best tokens would excuse a difference; there is none here.
    """
    reference, short = smollm2
    prompts = ["The capital of France is Paris. The capital of Italy is", "One, two, three, two,"]
    with cpu_engine(
        None,
        short if draft == "draft_model" else draft,
        4,
        max_num_seqs=2,
        max_model_len=64,
        kv_block_size=16,
        uniform_request_counts=[2],
    ) as engine:
        outs = engine.generate(prompts, greedy(20, ignore_eos=True))
        tokenizer = engine.tokenizer
    for prompt, out in zip(prompts, outs, strict=True):
        ids = tokenizer.encode(prompt)
        assert out.prompt_tokens == len(ids)
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids, *out.token_ids]]), use_cache=False).logits[0]
        scored = logits[len(ids) - 1 : -1]
        assert scored.argmax(dim=-1).tolist() == out.token_ids
        assert float(scored.topk(2).values.diff(dim=-1).abs().min()) > 1e-4
        assert out.stats.accepted + out.stats.steps == 19
        assert (out.stats.drafted > 0) == (draft is not None)


def test_negated_draft_is_rejected_by_construction(tmp_path, models):
    """The fixture does what its name says, so that "none accepted" is really driven."""
    negative = negated(models["target"], tmp_path / "negated")
    ids = PROMPTS[3]
    assert torch.allclose(Oracle(negative).logits(ids), -Oracle(models["target"]).logits(ids))
