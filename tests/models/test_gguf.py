"""GGUF files: tensors, configuration, refusals; the real SmolLM2 against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize
from oracle import Oracle
from paged import load, logits_of, relative_error
from reference import transformers_from_gguf
from tiny import make_tiny, read_json, read_tensors, write_checkpoint
from torch import Tensor

from specdec.verifier.gguf_file import GGUFFile, unpermute
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import read_config, save_first_layers
from specdec.verifier.models.config import UnsupportedModelError
from specdec.verifier.models.rope import parse_rope

IDS = [5, 17, 99, 3, 3, 42, 127, 0, 64]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
LLAMA_LIKE = ("llama", "qwen2", "qwen3")


def gguf_name(name: str, arch: str) -> str:
    names = GGUF_NAMES | (GEMMA_NAMES if arch.startswith("gemma") else {})
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, stem = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{names[stem]}.{kind}"
    return f"{names[stem]}.{kind}"


def permute(tensor: Tensor, num_heads: int) -> Tensor:
    """What the conversion to GGUF does to a Llama's q and k: the two halves interleaved."""
    heads = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape).contiguous()


def write_gguf(
    path: Path,
    folder: Path,
    *,
    arch: str = "llama",
    quant: Quant = Quant.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """The checkpoint in ``folder`` as a GGUF file; ``change`` adds what it likes."""
    config = read_json(folder / "config.json")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in read_tensors(folder).items():
        if arch == "llama" and "q_proj" in name:
            tensor = permute(tensor, heads)
        if arch == "llama" and "k_proj" in name:
            tensor = permute(tensor, kv_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        data, kind = tensor.numpy(), quant if tensor.dim() > 1 else Quant.F32
        writer.add_tensor(gguf_name(name, arch), quantize(data, kind), raw_dtype=kind)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("arch", LLAMA_LIKE)
def test_equals_the_folder_it_was_made_from(tmp_path: Path, arch: str, tie: bool) -> None:
    folder = make_tiny(tmp_path / "hf", family=arch, tie=tie, heads=6, kv_heads=2, eos=2, bos=1)
    path = write_gguf(tmp_path / "model.gguf", folder, arch=arch)
    ours, theirs = load(path), load(folder)
    # The file keeps epsilon and theta in float32.
    assert ours.config.rms_norm_eps == pytest.approx(theirs.config.rms_norm_eps, rel=1e-6)
    for name in ("tie_word_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "dtype"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.eos_token_ids == (2,)
    assert ours.config.bos_token_id == 1
    slots = theirs.weight_slots()
    for name, slot in ours.weight_slots().items():
        assert torch.equal(slot, slots[name]), name
    assert relative_error(logits_of(ours, IDS), logits_of(theirs, IDS)) < 1e-6


@pytest.mark.parametrize("arch", ["gemma2", "gemma3"])
def test_gemma(tmp_path: Path, arch: str) -> None:
    """Norms are stored plus one, and what the file leaves out is as llama.cpp has it."""
    family = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[arch]
    fields = {"head_dim": 16, "query_pre_attn_scalar": 16, "tie": True, "layers": 3}
    if arch == "gemma3":
        fields |= {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 3}
    folder = make_tiny(tmp_path / "hf", family=family, **fields)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(6)
        if arch == "gemma2":
            writer.add_attn_logit_softcapping(5.0)
            writer.add_final_logit_softcapping(9.0)
        else:
            writer.add_sliding_window_pattern([True, True, False])

    path = write_gguf(tmp_path / "model.gguf", folder, arch=arch, change=add)
    ours, theirs = load(path), load(folder)
    for name in ("sliding_window", "sliding_layers", "local_rope", "attention_scale"):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert set(ours.weight_slots()) == set(theirs.weight_slots())
    assert relative_error(logits_of(ours, IDS), Oracle(folder).logits(IDS)) < 1e-4


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_27b_gemmas_scale_by_their_width(tmp_path: Path, arch: str, layers: int) -> None:
    family = {"gemma2": "gemma2", "gemma3": "gemma3_text"}[arch]
    folder = make_tiny(tmp_path / "hf", family=family, layers=layers, hidden=96, ffn=8)
    path = write_gguf(tmp_path / "model.gguf", folder, arch=arch)
    assert read_config(path).attention_scale == 24**-0.5


def test_biases_are_permuted_too(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "hf", attention_bias=True, mlp_bias=True)
    path = write_gguf(tmp_path / "model.gguf", folder)
    assert relative_error(logits_of(load(path), IDS), Oracle(folder).logits(IDS)) < 1e-4


@pytest.mark.parametrize("quant", [Quant.Q4_1, Quant.Q8_0, Quant.F16, Quant.BF16], ids=str)
def test_quantised_tensors(tmp_path: Path, quant: Quant) -> None:
    folder = make_tiny(tmp_path / "hf", hidden=64, ffn=96)
    path = write_gguf(tmp_path / "model.gguf", folder, quant=quant)
    # Quantised in the order of the file, so permuted before and after.
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        if tensor.dim() > 1:
            rows = torch.from_numpy(dequantize(quantize(tensor.numpy(), quant), quant).copy())
            tensor = rows.view(tensor.shape)
        tensors[name] = tensor
    write_checkpoint(folder, read_json(folder / "config.json"), tensors)
    assert torch.equal(logits_of(load(path), IDS), logits_of(load(folder), IDS))
    expected = torch.float16 if quant == Quant.F16 else torch.bfloat16
    assert load(path, dtype=None).dtype == expected


def test_rope_factors_are_llama3_scaling(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = make_tiny(tmp_path / "hf", head_dim=32, rope_scaling=llama3)
    from specdec.verifier.models.rope import inverse_frequencies

    plain = inverse_frequencies(parse_rope({}, head_size=32, max_position=512))
    scaled = inverse_frequencies(
        parse_rope({"rope_scaling": llama3}, head_size=32, max_position=512)
    )

    def add_factors(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())

    path = write_gguf(tmp_path / "model.gguf", folder, change=add_factors)
    ids = IDS * 20
    assert relative_error(logits_of(load(path), ids), Oracle(folder).logits(ids)) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = 128
    folder = make_tiny(tmp_path / "hf", rope_scaling=scaling)

    def add_scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(128)

    path = write_gguf(tmp_path / "model.gguf", folder, change=add_scaling)
    ids = IDS * 20
    assert relative_error(logits_of(load(path), ids), Oracle(folder).logits(ids)) < 1e-4


def test_end_of_turn_ends_too(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "model.gguf",
        make_tiny(tmp_path / "hf"),
        change=lambda writer: writer.add_eot_token_id(7),
    )
    assert read_config(path).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    ("arch", "change", "named"),
    [
        ("gemma", None, "GGUF architecture 'gemma'"),
        ("llama", lambda w: w.add_expert_count(8), "mixture of experts"),
        ("llama", lambda w: w.add_sliding_window(64), "sliding_window=64"),
        (
            "llama",
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope scaling 'longrope'",
        ),
    ],
    ids=["architecture", "experts", "window", "rope"],
)
def test_unsupported_files(tmp_path: Path, arch: str, change: Any, named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_tiny(tmp_path / "hf"), arch=arch, change=change)
    with pytest.raises(UnsupportedModelError, match=named) as error:
        read_config(path)
    assert "m.gguf" in str(error.value)


def test_unknown_tensors_are_named(tmp_path: Path) -> None:
    def add_experts(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 4), np.float32))

    path = write_gguf(tmp_path / "m.gguf", make_tiny(tmp_path / "hf"), change=add_experts)
    with pytest.raises(ValueError, match=r"no use for: blk\.0\.ffn_gate_exps\.weight"):
        load(path)


@pytest.mark.parametrize("keep", [0, 3, 20, 500, 2000, -1])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_tiny(tmp_path / "hf"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf"):
        read_config(path)


def test_unpermute_undoes_permute() -> None:
    rows = torch.arange(6 * 16).view(96, 1)
    assert torch.equal(unpermute(permute(rows, 6), 6), rows)
    assert permute(rows, 6)[:4, 0].tolist() == [0, 8, 1, 9]


@pytest.mark.smollm2
def test_smollm2_configuration() -> None:
    config = read_config(None)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_size) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rope.theta == 100_000
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))


@pytest.mark.smollm2
def test_own_header_reader_agrees_with_the_package() -> None:
    path = resolve_model(None)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name
    assert len(ours.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_equals_transformers() -> None:
    """Bit for bit in the weights, to 1e-4 in the logits."""
    path = resolve_model(None)
    reference, model = transformers_from_gguf(path), load(None)
    theirs = reference.state_dict()
    for name, slot in model.weight_slots().items():
        assert torch.equal(slot, theirs[name]), name
    ids = [1, 4093, 198, 19556, 28, 638, 359, 346, 47, 2, 198, 1, 520, 9531, 198]
    with torch.inference_mode():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    actual = logits_of(model, ids, chunks=[9, 5, 1])
    assert relative_error(actual, expected) < 1e-4
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.smollm2
def test_first_layers_of_smollm2(tmp_path: Path) -> None:
    short = save_first_layers(None, tmp_path, 1, dtype=torch.bfloat16)
    config = read_config(short)
    assert (config.num_layers, config.dtype, config.eos_token_ids) == (1, torch.bfloat16, (2,))
    assert load(short).layers[0].mlp.down_proj.weight.std() > 0.01
