"""P1 for every family: the text and the counts of each drafter, on graphs, eager and in chunks."""

import pytest
from eagle_heads import make_head
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, cpu_engine, greedy
from oracle import Oracle, expect, speculate
from tiny import blended, make_tiny

# Beside Llama, which `test_lossless.py` has: family, and fields of a config that changes layers.
MODELS = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"layers": 3, "mlp_only_layers": [1]},
    "deepseek_v2": {"layers": 3},
    "deepseek_v3": {"layers": 3},
    "mistral": {"sliding_window": 7},
    "gemma2": {"layers": 3},
    "gemma3_text": {"layers": 3},
    "bamba": {"layers": 3},
}
ONE_RUNG = {"uniform_request_counts": [5]}
NEW_TOKENS = 20


class Case:
    """A target, a draft that is often right, and their oracles."""

    def __init__(self, root, family, **fields):
        self.target = str(make_tiny(root / "target", family=family, seed=5, **fields))
        self.draft = str(blended(self.target, root / "draft", 0.1))
        self.oracle, self.proposer = Oracle(self.target), Oracle(self.draft)

    def expected(self, prompt, k, proposer=None):
        return speculate(self.oracle, proposer, prompt, k=k, max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    return Case(root, request.param, **MODELS[request.param])


def check(engine, case, k, proposer=None, counts=True):
    outs = engine.generate(PROMPTS, greedy(NEW_TOKENS))
    for prompt, out in zip(PROMPTS, outs, strict=True):
        expect(out, case.expected(prompt, k, proposer), counts=counts)
    assert_no_leak(engine)
    return outs


@pytest.mark.parametrize("options", [ONE_RUNG, {"cudagraph_mode": "NONE"}], ids=["graphs", "eager"])
def test_draft_model(case, options):
    with cpu_engine(case.target, case.draft, 4, **options) as engine:
        outs = check(engine, case, 4, case.proposer)
        if options is ONE_RUNG:
            assert_decodes_replayed(engine)
    # Drafts are accepted and rejected, or the counts say nothing.
    drafted = sum(out.stats.drafted for out in outs)
    assert 0 < sum(out.stats.accepted for out in outs) < drafted


def test_no_drafter(case):
    with cpu_engine(case.target, None, 0, **ONE_RUNG) as engine:
        check(engine, case, 0)


def test_ngram(case):
    with cpu_engine(case.target, "ngram", 3, **ONE_RUNG) as engine:
        check(engine, case, 3, counts=False)


def test_layer_skip(case):
    with cpu_engine(case.target, "layer_skip:1", 2, **ONE_RUNG) as engine:
        check(engine, case, 2, Oracle(case.target, num_layers=1))


def test_eagle_head(case, tmp_path):
    """Its counts are an EAGLE test's affair; here its target is another family's."""
    head = make_head(case.target, tmp_path)
    with cpu_engine(case.target, f"eagle:{head}", 3, **ONE_RUNG) as engine:
        outs = check(engine, case, 3, counts=False)
    assert sum(out.stats.drafted for out in outs) > 0


def test_prompts_in_chunks_on_piecewise_graphs(case):
    options = {"max_num_batched_tokens": 25, "max_num_seqs": 3, "debug": True}
    with cpu_engine(case.target, case.draft, 4, **options) as engine:
        check(engine, case, 4, case.proposer)
        assert engine.stats().steps_by_mode["PIECEWISE"] > 0
