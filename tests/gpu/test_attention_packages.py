"""The engine over the flash-attn and flashinfer packages, where they are installed."""

import pytest
import torch
from harness import PROMPTS, assert_decodes_replayed, assert_no_leak, greedy
from tiny import make_tiny, negated

import specdec
from specdec.verifier.attention.select import unavailable

pytestmark = pytest.mark.gpu

PACKAGES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(unavailable(name) is not None, reason=f"needs {name}"),
    )
    for name in ("flash_attn", "flashinfer")
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Head size 128, for which flashinfer need not compile long; saved in bfloat16, which a draft
    keeps."""
    root = tmp_path_factory.mktemp("packages")
    shape = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "ffn": 320, "vocab": 300}
    target = make_tiny(root / "target", seed=3, std=0.15, dtype=torch.bfloat16, **shape)
    return {"same": str(target), "negated": str(negated(target, root / "negated"))}


def engine_of(model, draft, backend, **options):
    return specdec.Engine(
        model,
        draft,
        4,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=4,
        max_model_len=512,
        num_kv_blocks=64 if backend == "flash_attn" else 256,
        attention_backend=backend,
        **options,
    )


@pytest.mark.parametrize("backend", PACKAGES)
def test_drafts_of_the_same_model_are_accepted_on_full_graphs(models, backend):
    """Not bit for bit, since these packages are not batch-invariant: a rounding may turn a near
    tie. But a stale key, a wrong length or a wrong row would lose nearly every draft."""
    rates = {}
    for name, draft in models.items():
        with engine_of(models["same"], draft, backend) as engine:
            assert engine.attention.backend.name == backend
            assert engine.block_size == (256 if backend == "flash_attn" else 16)
            outs = engine.generate(PROMPTS, greedy(64, ignore_eos=True))
            assert_decodes_replayed(engine)
            assert_no_leak(engine)
            drafted = sum(out.stats.drafted for out in outs)
            rates[name] = sum(out.stats.accepted for out in outs) / drafted
    assert rates["same"] > 0.8 and rates["negated"] < 0.2


@pytest.mark.parametrize("backend", PACKAGES)
def test_exact_is_refused(models, backend):
    with pytest.raises(ValueError, match=f"exact=True: attention backend '{backend}'"):
        engine_of(models["same"], None, backend, exact=True)
