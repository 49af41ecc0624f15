"""Small EAGLE-3 heads for tests, good by construction, and targets whose layers only whisper.

A target whose layers add little has a next token that hangs mostly on the newest one. The heads
copy that token's embedding through attention that looks at itself, add noise that reads the
target's hidden states there and, through their last attention head, at every position before, and
are judged by the target's own norm and head: right now and then, and otherwise so where a key, a
value or a hidden state anywhere in the text is another.
"""

from pathlib import Path
from typing import Any

import tiny_families
import torch
from safetensors.torch import save_file
from tiny import EMBEDDING, HEAD, _write_json, make_tiny, read_json, read_tensors, write_checkpoint
from torch import Tensor

LAYER = "midlayer."


def whispering(
    folder: str | Path, *, loud: float = 0.01, habit: float = 0.2, **options: Any
) -> Path:
    """A tiny model whose attention and MLP outputs are scaled by ``loud``.

    ``habit``: how strongly each token calls for one certain next token.
    """
    made = make_tiny(folder, **({"layers": 3, "seed": 11} | options))
    tensors = read_tensors(made)
    embedding = tensors[EMBEDDING]
    order = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(1))
    tensors[HEAD][order] += habit * embedding / embedding.std()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(loud)
    return write_checkpoint(made, read_json(made / "config.json"), tensors)


def make_head(
    target: str | Path,
    folder: str | Path,
    *,
    noise: float = 0.3,
    history: float = 1.0,
    seed: int = 0,
    feature_layers: list[int] | None = None,
    draft_ids: list[int] | None = None,
    own_embedding: bool = False,
    own_head: bool = True,
    norm_before_residual: bool = True,
    parallel: bool = False,
    layout: str = "safeailab",
    dtype: torch.dtype = torch.float32,
    config_overrides: dict[str, Any] | None = None,
    tensor_overrides: dict[str, Tensor | None] | None = None,
) -> Path:
    """Write a head for ``target`` and return its folder.

    noise: how much the hidden states of the target move the head's choices. history: how much
    everything before does. draft_ids: a reduced
    draft vocabulary. layout: "safeailab" or "speculators". The overrides replace or, with None,
    remove fields and tensors.
    """
    theirs, weights = read_json(Path(target) / "config.json"), read_tensors(target)
    *_, last_norm = tiny_families.NAMES.get(theirs["model_type"], tiny_families.LLAMA_NAMES)
    size, vocab = theirs["hidden_size"], theirs["vocab_size"]
    head_dim = theirs["head_dim"]
    heads, ffn = size // head_dim, 96
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, std: float) -> Tensor:
        return std * torch.randn(rows, columns, generator=generator)

    def around(mean: float) -> Tensor:
        return mean + 0.1 * mean * torch.randn(size, generator=generator)

    # Rotated by their distance, two equal vectors are closest where they stand: each position
    # looks at itself. The first three frequencies tell apart the distances of short texts.
    still = torch.zeros(heads, head_dim)
    still[:-1, :3] = 12.0
    copy = torch.cat([torch.eye(size), matrix(size, size, 0.02)], dim=1)
    gather = torch.eye(size) + matrix(size, size, 0.01)
    if heads > 1:
        copy[-head_dim:] = matrix(head_dim, 2 * size, 3 / size**0.5)
        gather[:, -head_dim:] = matrix(size, head_dim, history / head_dim**0.5)
    tensors = {
        "fc.weight": matrix(size, 3 * size, 0.25),
        LAYER + "input_layernorm.weight": around(1.0),
        LAYER + "hidden_norm.weight": around(noise),
        LAYER + "self_attn.q_proj.weight": matrix(size, 2 * size, 0.05),
        LAYER + "self_attn.k_proj.weight": matrix(size, 2 * size, 0.05),
        LAYER + "self_attn.v_proj.weight": copy,
        LAYER + "self_attn.o_proj.weight": gather,
        LAYER + "self_attn.q_proj.bias": still.flatten(),
        LAYER + "self_attn.k_proj.bias": still.flatten().clone(),
        LAYER + "self_attn.v_proj.bias": torch.zeros(size),
        LAYER + "self_attn.o_proj.bias": torch.zeros(size),
        LAYER + "post_attention_layernorm.weight": around(1.0),
        LAYER + "mlp.gate_proj.weight": matrix(ffn, size, 0.1),
        LAYER + "mlp.up_proj.weight": matrix(ffn, size, 0.1),
        LAYER + "mlp.down_proj.weight": matrix(size, ffn, 0.02),
        "norm.weight": weights[f"model.{last_norm}.weight"].clone(),
    }
    ids = list(range(vocab)) if draft_ids is None else draft_ids
    if own_embedding:
        tensors["embed_tokens.weight"] = weights[EMBEDDING].clone()
    if own_head:
        tensors["lm_head.weight"] = weights.get(HEAD, weights[EMBEDDING])[ids]
    if draft_ids is not None:
        tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, torch.tensor(ids), 1)
    if parallel:
        tensors["mask_embedding"] = matrix(1, size, 0.25)[0]
        tensors["mask_feature"] = matrix(1, size, 1.0)[0]
    layer = {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": 1,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": theirs["max_position_embeddings"],
        "attention_bias": True,
        "hidden_act": "silu",
    }
    own: dict[str, Any] = {
        "draft_vocab_size": len(ids),
        "norm_before_residual": norm_before_residual,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if feature_layers is not None:
        own["eagle_aux_hidden_state_layer_ids"] = feature_layers
    if parallel:
        own["specdec_parallel_drafting"] = True
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **own}
    if layout == "speculators":
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            **own,
        }
        tensors = {name.replace(LAYER, "layers.0."): t for name, t in tensors.items()}
    config |= config_overrides or {}
    tensors |= tensor_overrides or {}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
    save_file(
        {
            name: (t.to(dtype) if t.is_floating_point() else t).contiguous()
            for name, t in tensors.items()
            if t is not None
        },
        folder / "model.safetensors",
    )
    return folder
