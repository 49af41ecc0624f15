"""P10 and C44: every row of a mixed batch has the logits of its own adapter's merged model."""

import pytest
import torch
from adapters import ALL, changed, merged, trained_by_peft, write_adapter
from harness import PROMPTS, cpu_engine, greedy
from oracle import Oracle
from tiny import make_tiny

TOLERANCE = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def assert_rows_equal(model, adapters, **options):
    """Log-probabilities of texts on all adapters and the base at once, against merged models.

    Relative to the size of the logits, as float32 rounds them.
    """
    names = [*adapters, None]
    params = greedy(6, logprobs=5)
    options = {"cudagraph_mode": "NONE", "max_num_seqs": len(names), **options}
    with cpu_engine(model, None, 0, lora=adapters, **options) as engine:
        prompts = [PROMPTS[i % 5] for i in range(len(names))]
        outs = engine.generate(prompts, params, lora=names)
        for name, prompt, out in zip(names, prompts, outs, strict=True):
            oracle = merged(model, adapters[name]) if name else Oracle(model)
            logits = oracle.logits([*prompt, *out.token_ids])[len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)
            size = logits.abs().max()
            for row, own in zip(expected, out.logprobs, strict=True):
                for token, value in own.top.items():
                    assert abs(float(row[token]) - value) <= TOLERANCE * size, (name, token)
            assert out.token_ids == oracle.greedy(prompt, 6)[0]


def test_ranks_scales_and_patterns_in_one_batch(models, tmp_path):
    """C44: alpha / r, alpha / sqrt(r), a rank and an alpha of one module's own, alpha 0."""
    base = models["target"]
    one_module = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "up_proj": 3},
        "alpha_pattern": {r"model\.layers\.0\.mlp\.down_proj": 40},
    }
    adapters = {
        "plain": write_adapter(tmp_path / "plain", base, seed=1, r=8, lora_alpha=16),
        "rslora": write_adapter(
            tmp_path / "rslora", base, seed=2, r=16, lora_alpha=16, use_rslora=True
        ),
        "patterns": write_adapter(tmp_path / "p", base, seed=3, r=4, lora_alpha=8, **one_module),
        "zero": write_adapter(tmp_path / "zero", base, seed=4, lora_alpha=0),
    }
    assert_rows_equal(base, adapters)
    with cpu_engine(base, lora=adapters, cudagraph_mode="NONE") as engine:
        zero = engine.generate(PROMPTS[0], greedy(9), lora="zero")
        assert zero.token_ids == engine.generate(PROMPTS[0], greedy(9)).token_ids


@pytest.mark.parametrize(
    "targets",
    [["q_proj"], ["k_proj", "v_proj"], ["up_proj"], ["o_proj", "down_proj"], "all-linear"],
    ids=str,
)
def test_part_of_a_fused_projection(models, tmp_path, targets):
    """The other slices of q/k/v and of gate/up stay as they are."""
    saved = trained_by_peft(tmp_path / "a", models["target"], r=4, target_modules=targets)
    assert_rows_equal(models["target"], {"a": saved})


def test_targets_by_expression_and_by_path(models, tmp_path):
    base = models["target"]
    expression = r"model\.layers\.1\.(mlp\.(gate|up)_proj|self_attn\.k_proj)"
    adapters = {
        "expression": trained_by_peft(tmp_path / "e", base, target_modules=expression),
        "path": trained_by_peft(tmp_path / "p", base, target_modules=["layers.0.mlp.up_proj"]),
        "excluded": trained_by_peft(
            tmp_path / "x", base, target_modules=list(ALL), exclude_modules=["layers.0.mlp.up_proj"]
        ),
    }
    assert_rows_equal(base, adapters)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "biased"])
def test_biases_and_query_norms(tmp_path, family):
    options = {"attention_bias": True, "mlp_bias": True} if family == "biased" else {}
    name = "llama" if family == "biased" else family
    base = make_tiny(tmp_path / "model", seed=5, family=name, **options)
    assert_rows_equal(str(base), {"a": write_adapter(tmp_path / "a", base, seed=1)})


def test_embedding_and_head(models, tmp_path):
    base = models["target"]
    adapters = {
        "both": trained_by_peft(
            tmp_path / "both", base, r=4, target_modules=["embed_tokens", "lm_head", "v_proj"]
        ),
        "head": write_adapter(tmp_path / "head", base, target_modules=["lm_head"]),
        "embedding": write_adapter(tmp_path / "embedding", base, target_modules=["embed_tokens"]),
        "plain": write_adapter(tmp_path / "plain", base),
    }
    assert_rows_equal(base, adapters)


def test_a_prompt_in_chunks_has_its_adapter_in_each(models, tmp_path):
    base = models["target"]
    adapters = {"a": write_adapter(tmp_path / "a", base, seed=1)}
    assert_rows_equal(base, adapters, max_num_batched_tokens=5)


def test_weights_stored_in_half_precision(models, tmp_path):
    """The file's values count, not its type."""
    from safetensors.torch import load_file, save_file

    folder = changed(write_adapter(tmp_path / "a", models["target"]), tmp_path / "half")
    file = folder / "adapter_model.safetensors"
    save_file({name: t.to(torch.bfloat16) for name, t in load_file(file).items()}, file)
    assert_rows_equal(models["target"], {"half": str(folder)})
