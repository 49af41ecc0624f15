"""The unrolled head against one that computes every chain on its own, and its files."""

from pathlib import Path

import pytest
import torch
from made import SHAPE, documents, head_of, target_of, vocab_of
from safetensors.torch import load_file
from slow_head import SlowHead
from tiny import make_tiny, read_json

from specdec.train.export import reload_head, save_head
from specdec.train.head_training import HeadTraining, unroll
from specdec.train.rows import PackedRows
from specdec.train.target import FrozenTarget

IDS = [1, 2, 5, 9, 30, 31, 63]
STEPS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    folder = make_tiny(tmp_path_factory.mktemp("head"), layers=3, vocab=64, **SHAPE)
    return target_of(folder)


def saved(made: HeadTraining, folder: Path) -> SlowHead:
    """The head as its file holds it, in float32 so that nothing is rounded."""
    save_head(made.head, made.vocab, folder, torch.float32)
    model = made.target.model
    return SlowHead(folder, model.embed_tokens, model.lm_head)


@pytest.mark.parametrize("parallel", [False, True], ids=["chain", "parallel"])
def test_each_step_sees_the_real_entries_and_its_own_chain_alone(
    target: FrozenTarget, parallel: bool, tmp_path: Path
) -> None:
    """Three documents lie in one row: what a chain sees of a neighbour would change its output."""
    made = head_of(target, IDS, parallel=parallel)
    slow = saved(made, tmp_path)
    rows = PackedRows(documents([13, 9, 7], 64), 32, "cpu")
    assert len(rows) == 1
    batch = rows.batch([0])
    states = target(batch)
    with torch.no_grad():
        steps = torch.stack(list(unroll(made.head, target, batch, states.features, STEPS)))
    compared = 0
    for document, start in rows.rows[0].places:
        features = states.features[0, start : start + len(document.tokens)]
        for at in range(len(document.tokens) - 1 - STEPS):
            text = document.tokens[at + 2 : at + 1 + STEPS]
            expected = slow.chain(features, document.tokens, at, text)
            assert torch.allclose(steps[:, 0, start + at], expected, atol=2e-4, rtol=1e-3)
            compared += 1
    assert compared == 13 + 9 + 7 - 3 * (1 + STEPS)


@pytest.mark.parametrize("own_head", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("parallel", [False, True], ids=["chain", "parallel"])
def test_the_folder_is_the_public_layout(
    target: FrozenTarget, own_head: bool, parallel: bool, tmp_path: Path
) -> None:
    made = head_of(target, IDS, own_head=own_head, parallel=parallel)
    made.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    hidden, q, kv, ffn = 32, 32, 16, 48
    expected = {
        "fc.weight": [hidden, 3 * hidden],
        "midlayer.input_layernorm.weight": [hidden],
        "midlayer.hidden_norm.weight": [hidden],
        "midlayer.self_attn.q_proj.weight": [q, 2 * hidden],
        "midlayer.self_attn.k_proj.weight": [kv, 2 * hidden],
        "midlayer.self_attn.v_proj.weight": [kv, 2 * hidden],
        "midlayer.self_attn.o_proj.weight": [hidden, q],
        "midlayer.post_attention_layernorm.weight": [hidden],
        "midlayer.mlp.gate_proj.weight": [ffn, hidden],
        "midlayer.mlp.up_proj.weight": [ffn, hidden],
        "midlayer.mlp.down_proj.weight": [hidden, ffn],
        "norm.weight": [hidden],
        "d2t": [len(IDS)],
        "t2d": [64],
    }
    if own_head:
        expected["lm_head.weight"] = [len(IDS), hidden]
    if parallel:
        expected |= {"mask_embedding": [hidden], "mask_feature": [hidden]}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert (tensors["d2t"] + torch.arange(len(IDS))).tolist() == IDS
    assert tensors["t2d"].nonzero().flatten().tolist() == IDS
    weights = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
    config = read_json(tmp_path / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config.get("specdec_parallel_drafting", False) is parallel
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "draft_vocab_size": len(IDS),
        "max_position_embeddings": 512,
    }
    assert {name: config[name] for name in sizes} == sizes
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0


def test_a_reloaded_head_drafts_as_its_file_says(target: FrozenTarget, tmp_path: Path) -> None:
    """The sizes of the features are folded into fc, and the weights are rounded to bfloat16."""
    made = head_of(target, IDS)
    made.export(tmp_path)
    scale = made.head.feature_scale.clone()
    before = made.head.fc.weight / scale
    reload_head(made.head, tmp_path)
    assert made.head.feature_scale.unique().tolist() == [1.0]
    assert torch.equal(made.head.fc.weight, before.bfloat16().float())
    assert not torch.equal(made.head.fc.weight, before)


def test_the_scale_of_features_leaves_out_what_it_is_told(target: FrozenTarget) -> None:
    made = head_of(target, IDS)
    features = torch.randn(2, 5, 96)
    features[:, 0] = 1e4
    keep = torch.ones(2, 5, dtype=torch.bool)
    keep[:, 0] = False
    made.head.set_feature_scale(features, keep)
    assert torch.allclose(made.head.feature_scale, features[:, 1:].abs().mean((0, 1)), rtol=1e-5)


def test_a_head_begins_as_the_targets_last_layer(target: FrozenTarget) -> None:
    """What reads embeddings and low layers is small, the rest is the target's to the bit."""
    vocab = vocab_of(IDS, 64)
    config = head_of(target, IDS).head.config
    made = HeadTraining(config, target, vocab, num_steps=2, decay=0.8, seed=3)
    batch = PackedRows(documents([13, 9, 7], 64), 32, "cpu").batch([0])
    made.prepare(batch)
    layer = dict(target.model.first_layers()[-1].weight_slots("x"))
    own = made.head.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(own.self_attn, name).weight
        assert torch.equal(weight[:, 32:], layer[f"x.self_attn.{name}.weight"])
        assert 0 < weight[:, :32].std() < 0.5 * 64**-0.5
    assert torch.equal(own.self_attn.o_proj.weight, layer["x.self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(own.mlp, name).weight, layer[f"x.mlp.{name}.weight"])
    assert torch.equal(own.hidden_norm.weight, layer["x.input_layernorm.weight"])
    states = target(batch)
    fused = made.head.fuse(states.features)[batch.document >= 0]
    highest = states.features[..., -32:][batch.document >= 0]
    likeness = torch.nn.functional.cosine_similarity(fused, highest, dim=-1)
    assert likeness.mean() > 0.9
