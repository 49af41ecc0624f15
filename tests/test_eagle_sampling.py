"""P2 with an EAGLE-3 head: the target's distribution, and drafts through the vocabulary map.

Heads and targets whose distributions are the same after every text; a draft model of the head's
distribution must be drafted and judged alike, token for token, whatever the order of the map.
"""

import math

import pytest
import torch
from eagle_heads import make_head, whispering
from harness import (
    PROMPTS,
    assert_decodes_replayed,
    chi_square_p_value,
    cpu_engine,
    greedy,
    histogram,
    split_by_origin,
)
from tiny import LOG_ZERO, constant_model

# The seeds are fixed; a correct engine fails one comparison with this chance, the module with 1e-5.
ALARM = 1e-6
SMALL = {"layers": 1, "hidden": 16, "heads": 1, "kv_heads": 1, "head_dim": 16, "ffn": 16}
TARGET = (0.30, 0.30, 0.05, 0.25, 0.10)
DRAFT = (0.45, 0.30, 0.0, 0.25, 0.0)
# The draft vocabulary: in no order, and without two of the target's ids.
DRAFT_IDS = [3, 0, 1]
NUM_REQS = 20


def constant_head(target, folder, *, parallel=False):
    """A head that drafts from DRAFT after every text of a ``constant_model``."""
    logits = torch.tensor([math.log(DRAFT[token]) for token in DRAFT_IDS])
    head = torch.zeros(len(DRAFT_IDS), 16)
    # The stream is a row of ones, as the target's.
    head[:, 0] = logits * math.sqrt(1 + 1e-5)
    still = {"midlayer.self_attn.o_proj.weight": 16, "midlayer.mlp.down_proj.weight": 96}
    tensors = {name: torch.zeros(16, size) for name, size in still.items()}
    tensors |= {
        "fc.weight": torch.eye(16, 48),
        "norm.weight": torch.ones(16),
        "lm_head.weight": head,
    }
    if parallel:
        tensors["mask_feature"] = torch.ones(16)
    return make_head(
        target,
        folder,
        draft_ids=DRAFT_IDS,
        norm_before_residual=False,
        parallel=parallel,
        tensor_overrides=tensors,
    )


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    root = tmp_path_factory.mktemp("constant")
    options = SMALL | {"max_position": 512}
    target = constant_model(root / "target", TARGET, **options)
    logits = [math.log(prob) if prob else LOG_ZERO for prob in DRAFT]
    assert logits.count(LOG_ZERO) == 2
    return {
        "target": str(target),
        "model": str(constant_model(root / "model", DRAFT, **options)),
        "chain": f"eagle:{constant_head(target, root / 'chain')}",
        "parallel": f"eagle:{constant_head(target, root / 'parallel', parallel=True)}",
    }


@pytest.fixture(scope="module")
def draw(engines, constant):
    def run(draft, acceptance, length=61, **fields):
        engine = engines(
            constant["target"],
            constant[draft],
            3,
            acceptance=acceptance,
            max_num_seqs=NUM_REQS,
            max_model_len=128,
            kv_block_size=16,
            uniform_request_counts=[NUM_REQS],
        )
        params = [greedy(length, seed=seed, **fields) for seed in range(NUM_REQS)]
        outs = engine.generate([[0, 1]] * NUM_REQS, params)
        assert_decodes_replayed(engine)
        return outs

    return run


FIELDS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 1.0, "min_p": 0.4},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("head", ["chain", "parallel"])
def test_a_head_drafts_as_a_model_of_its_distribution(draw, head, acceptance, fields):
    """The noise of a draft and the cuts go by the target's ids, not by the draft's own."""
    mine = draw(head, acceptance, **fields)
    model = draw("model", acceptance, **fields)
    for out, wanted in zip(mine, model, strict=True):
        assert out.token_ids == wanted.token_ids
        assert out.stats.accepted_per_step == wanted.stats.accepted_per_step
    drafted, accepted = (sum(getattr(o.stats, n) for o in mine) for n in ("drafted", "accepted"))
    assert 0 < accepted < drafted


@pytest.mark.parametrize("head", ["chain", "parallel"])
def test_rejection_follows_the_target(draw, head):
    """C05: the q of the test is the q that the draft came from, in the target's vocabulary."""
    outs = draw(head, "rejection", length=121, temperature=1.0)
    kept = [min(p, q) for p, q in zip(TARGET, DRAFT, strict=True)]
    left = [p - m for p, m in zip(TARGET, kept, strict=True)]
    expected = {
        "accepted": [each / sum(kept) for each in kept],
        "recovered": [each / sum(left) for each in left],
        "bonus": TARGET,
    }
    found = {kind: [0] * 5 for kind in expected}
    for out in outs:
        for kind, ids in split_by_origin(out).items():
            counts = histogram(ids, 5)
            found[kind] = [a + b for a, b in zip(found[kind], counts, strict=True)]
    for kind, probs in expected.items():
        assert sum(found[kind]) > 100
        assert chi_square_p_value(found[kind], probs) > ALARM, (kind, found[kind])
    first = [out.stats.accepted_per_step[i] > 0 for out in outs for i in range(20)]
    assert chi_square_p_value([sum(first), len(first) - sum(first)], [sum(kept), 1 - sum(kept)]) > (
        ALARM
    )


@pytest.mark.parametrize("options", [{"draft_ids": list(range(0, 128, 2))}, {"parallel": True}])
def test_seeded_text_is_that_without_a_drafter(tmp_path, options):
    """Coupled rows beside greedy ones; their drafts are the target's own choice now and then."""
    target = str(whispering(tmp_path / "target"))
    head = make_head(target, tmp_path / "head", **options)
    params = [
        greedy(30, temperature=0.5, seed=5),
        greedy(30),
        greedy(30, temperature=0.5, top_p=0.8, seed=2**63),
        greedy(30, temperature=0.3, top_k=20, seed=7),
        greedy(30, temperature=0.5, seed=8, presence_penalty=0.5, logit_bias={3: 2.0}),
    ]
    rungs = {"uniform_request_counts": [5]}
    with (
        cpu_engine(target, None, **rungs) as plain,
        cpu_engine(target, f"eagle:{head}", 4, **rungs) as drafted,
    ):
        expected = plain.generate(PROMPTS, params)
        outs = drafted.generate(PROMPTS, params)
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
        assert all(out.stats.accepted > 0 for out in outs[:3])
        alone = drafted.generate(PROMPTS[2], params[2])
        assert alone.stats.accepted_per_step == outs[2].stats.accepted_per_step
