"""Suffix lookup and lookup before a model on a real GPU: kernels, texts, counts, graphs."""

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from suffix_oracle import RULES, Cases
from tiny import blended, make_tiny

import specdec
from specdec.drafters.history import TextHistory
from specdec.kernels.suffix import SuffixHistory, SuffixRule, propose_suffix

pytestmark = pytest.mark.gpu

# Seven kinds of loop, so that lookups of five tokens match.
LOOPS = [[i, i + 1, i, 7, 3 * i] * 6 for i in range(1, 8)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Head size 64, a group of three: the shape of the bundled model, and real tiles."""
    root = tmp_path_factory.mktemp("lookup")
    shape = {"hidden": 192, "heads": 3, "kv_heads": 1, "head_dim": 64, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, **shape)
    return str(target), str(blended(target, root / "blend", 0.1))


def gpu_engine(pair, draft, k=4, **options):
    defaults = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "num_kv_blocks": 512,
    }
    return specdec.Engine(pair[0], draft, k, **(defaults | options))


def ids(outs):
    return [out.token_ids for out in outs]


# -- the kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("k", [1, 4, 7])
def test_kernels_equal_their_twin(rule, k):
    for seed in range(4):
        cases = Cases(seed, rule)
        made = propose_suffix(*cases.arguments(k, "cuda"))
        assert torch.equal(made.cpu(), propose_suffix(*cases.arguments(k)))


@pytest.mark.parametrize("size", [6_000, 65_536])
def test_long_texts_and_a_full_history(size):
    """63 rows of up to 5,000 tokens in two blocks; a history whose search takes several rounds."""
    generator = torch.Generator().manual_seed(size)
    tokens = torch.randint(9, (64, 5001), generator=generator, dtype=torch.int32)
    lengths = torch.randint(0, 5000, (64, 2), generator=generator)[:, 0]
    texts, rule = TextHistory(size, 16), SuffixRule()
    while texts.num_tokens < size - 1200:
        text = torch.randint(9, (1000,), generator=generator).tolist()
        texts.add(text, "ab"[texts.num_tokens % 3 > 0])
    order, of_group = texts.flatten()
    bounds = [of_group.get("ab"[row % 2], (0, 0)) for row in range(64)]
    arrays = SuffixHistory(
        torch.from_numpy(texts.pool),
        torch.from_numpy(order),
        torch.tensor(bounds, dtype=torch.int32),
    )
    slots = torch.arange(63, -1, -1)
    expected = propose_suffix(tokens[:, :5000], lengths, slots, arrays, 5, rule)
    made = propose_suffix(
        tokens.cuda()[:, :5000],
        lengths.cuda(),
        slots.cuda(),
        SuffixHistory(*(each.cuda() for each in arrays)),
        5,
        rule,
    )
    assert torch.equal(made.cpu(), expected)
    assert (expected >= 0).any()


# -- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["suffix", "suffix+blend", "ngram+blend", "suffix+layer_skip:1"])
def test_bfloat16_texts_are_those_without_a_drafter(pair, draft):
    """P1, bit for bit, greedy and seeded; the second time from what was written the first."""
    draft = draft.replace("blend", pair[1])
    prompts = PROMPTS + LOOPS[:3]
    # Of three tokens, so that a text repeats itself.
    few = {token: 40.0 for token in (3, 4, 5)}
    params = [greedy(64), greedy(32, temperature=0.9, seed=11), greedy(64, logit_bias=few)]
    with gpu_engine(pair, None) as engine:
        expected = [ids(engine.generate(prompts, each)) for each in params]
    for k in (1, 4, 7):
        with gpu_engine(pair, draft, k, debug=True) as engine:
            addresses = _addresses(engine.drafter)
            for _ in range(2):
                assert [ids(engine.generate(prompts, each)) for each in params] == expected
            assert_decodes_replayed(engine)
            assert _addresses(engine.drafter) == addresses
            stats = engine.stats()
            counts = stats.by_source.values()
            assert sum(count.drafted for count in counts) == stats.drafted
            assert sum(count.accepted for count in counts) == stats.accepted
            assert len(counts) == (2 if "+" in draft else 1)
            assert stats.by_source[draft.partition("+")[0]].accepted > 0
            assert_no_leak(engine)


def _addresses(drafter):
    lookup = getattr(drafter, "first", drafter)
    return [each.data_ptr() for each in getattr(lookup, "arrays", ())]


@pytest.mark.parametrize("draft", ["suffix", "suffix+blend", "ngram+blend"])
def test_graphs_draft_what_eager_drafts(pair, draft):
    """P4 by counts too, of prompts one after the other: which text is learnt first is the same."""
    draft = draft.replace("blend", pair[1])
    with (
        gpu_engine(pair, draft, 4) as graphs,
        gpu_engine(pair, draft, 4, cudagraph_mode="NONE") as eager,
    ):
        for prompt in [*PROMPTS, *LOOPS, *PROMPTS]:
            one, other = graphs.generate(prompt, greedy(24)), eager.generate(prompt, greedy(24))
            assert one.token_ids == other.token_ids
            assert one.stats.drafted_per_step == other.stats.drafted_per_step
            assert one.stats.accepted_per_step == other.stats.accepted_per_step
        assert graphs.stats().by_source == eager.stats().by_source


def test_float32_counts_are_those_of_the_cpu(pair):
    """The lookup's and the model's drafts, and what is accepted of them, on both devices."""
    draft = f"suffix+{pair[1]}"
    with (
        gpu_engine(pair, draft, 4, dtype="float32") as gpu,
        specdec.Engine(pair[0], draft, 4, device="cpu", max_model_len=256, max_num_seqs=8,
                       cudagraph_mode="NONE") as cpu,
    ):  # fmt: skip
        num_equal = 0
        for prompt in [*LOOPS, LOOPS[0]]:
            one, other = gpu.generate(prompt, greedy(40)), cpu.generate(prompt, greedy(40))
            if one.token_ids == other.token_ids:
                assert one.stats.drafted_per_step == other.stats.drafted_per_step
                num_equal += 1
        # One close call may part the texts of a prompt; the loop is there twice.
        assert num_equal >= 6


def test_every_request_count_replays_a_full_graph(pair):
    with gpu_engine(pair, f"suffix+{pair[1]}", 4, max_num_seqs=9) as engine:
        for count in range(1, 10):
            engine.generate([LOOPS[i % 7] for i in range(count)], greedy(16))
        assert_decodes_replayed(engine)
