"""Small random checkpoints for tests, written as Hugging Face folders without transformers.

Two-dimensional weights have standard deviation 0.25: with the usual 0.02 the logits are so flat
that a greedy text hides most faults.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_families
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **tiny_families.ARCHITECTURES,
}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Weight and token of logits that stand for probability zero: exp(-1e4) is 0.0 in every dtype.
LOG_ZERO = -1e4


def make_tiny(
    folder: str | Path,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn: int = 128,
    vocab: int = 128,
    std: float = 0.25,
    tie: bool = False,
    family: str = "llama",
    max_position: int = 512,
    eos: int | list[int] | None = None,
    bos: int | None = None,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: str | None = None,
    tokenizer_vocab: int | None = None,
    chat_template: str | None = None,
    **config_overrides: Any,
) -> Path:
    """Write a random model of ``family`` (a key of ARCHITECTURES) and return its folder.

    ``tokenizer`` "bytes" or "words" writes a tokenizer.json of ``tokenizer_vocab`` entries
    (``vocab`` by default: fewer make the model's last rows padding). ``config_overrides`` go into
    config.json as they are; ``attention_bias=True`` and ``mlp_bias=True`` also write the biases.
    """
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tie,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": None,
    }
    if family == "mistral":
        config["sliding_window"] = None
    config |= tiny_families.FIELDS.get(family, {}) | config_overrides
    if "kv_lora_rank" in config:
        # transformers reads these two and makes nothing of them.
        config |= {"head_dim": config["qk_rope_head_dim"], "num_key_value_heads": heads}
    tensors = _random_tensors(config, family, seed, std)
    write_checkpoint(
        folder, config, {name: t.to(dtype) for name, t in tensors.items()}, shards=shards
    )
    if tokenizer is not None:
        size = vocab if tokenizer_vocab is None else tokenizer_vocab
        write_tokenizer(folder, tokenizer, size, chat_template=chat_template)
    return Path(folder)


def write_checkpoint(
    folder: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], *, shards: int = 1
) -> Path:
    """Write config.json, generation_config.json and the tensors in ``shards`` safetensors files."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generation = {
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    return folder


def read_tensors(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, by name."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_json(path: str | Path) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def negated(folder: str | Path, out: str | Path) -> Path:
    """A copy whose head is negated, and so untied: as a draft, none of its tokens is accepted."""
    return _with_head(folder, out, lambda head: -head)


def blended(folder: str | Path, out: str | Path, scale: float, seed: int = 0) -> Path:
    """A copy whose head has noise of ``scale`` times its own deviation: a half-good draft."""

    def add_noise(head: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(head.shape, generator=generator)
        return (head.float() + scale * head.float().std() * noise).to(head.dtype)

    return _with_head(folder, out, add_noise)


def resized_vocab(folder: str | Path, out: str | Path, vocab: int, *, loud: bool = False) -> Path:
    """A copy with ``vocab`` rows in embedding and head: cut, or padded with zero rows.

    ``loud`` fills the head's last two rows with a large vector and its negative, so that one of
    the two is the argmax in nearly every context. ``constant_model`` has certain padding logits.
    """
    config, tensors = _copy_of(folder, out)
    for name in (EMBEDDING, HEAD):
        old = tensors[name]
        new = torch.zeros(vocab, old.shape[1], dtype=old.dtype)
        rows = min(vocab, old.shape[0])
        new[:rows] = old[:rows]
        tensors[name] = new
    if loud:
        head = tensors[HEAD]
        head[-2] = 50 * head.float().std() * torch.ones(head.shape[1])
        head[-1] = -head[-2]
    return write_checkpoint(
        out, config | {"vocab_size": vocab, "tie_word_embeddings": False}, tensors
    )


def constant_model(
    folder: str | Path,
    probs: Sequence[float],
    *,
    vocab: int | None = None,
    padding_logit: float = LOG_ZERO,
    **options: Any,
) -> Path:
    """A model whose next-token distribution at temperature 1 is ``probs`` whatever the context.

    All embedding rows are ones, attention and MLP add zero, and the head reads one feature, so
    logit i is log(probs[i]) up to float32 rounding. Rows from len(probs) to ``vocab`` get
    ``padding_logit``. ``options`` go to ``make_tiny``.
    """
    size = len(probs) if vocab is None else vocab
    make_tiny(folder, vocab=size, **options)
    config, tensors = _copy_of(folder, folder)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
            tensor.zero_()
    tensors[EMBEDDING].fill_(1.0)
    tensors["model.norm.weight"].fill_(1.0)
    logits = [math.log(p) if p > 0 else LOG_ZERO for p in probs]
    logits += [padding_logit] * (size - len(probs))
    head = torch.zeros_like(tensors[EMBEDDING])
    # The norm of a row of ones is 1 / sqrt(1 + eps) in every feature.
    head[:, 0] = torch.tensor(logits) * math.sqrt(1.0 + config["rms_norm_eps"])
    tensors[HEAD] = head
    return write_checkpoint(folder, config | {"tie_word_embeddings": False}, tensors)


def write_tokenizer(
    folder: str | Path,
    kind: str,
    vocab: int,
    *,
    chat_template: str | None = None,
    swap: tuple[int, int] | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json with ids 0 .. vocab - 1.

    "bytes": id = byte value, from 256 on the two-character entries "aa", "ab", ... that no text
    encodes to. "words": id i is the word "w<i>", words are separated by spaces. ``swap``
    exchanges the strings of two ids.
    """
    if kind == "bytes":
        strings = [_BYTE_CHARACTERS[i] for i in range(min(vocab, 256))]
        strings += [chr(97 + i // 26) + chr(97 + i % 26) for i in range(max(vocab - 256, 0))]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        model: dict[str, Any] = {"type": "BPE", "merges": [], "ignore_merges": False}
        pre_tokenizer: dict[str, Any] = byte_level | {"use_regex": False}
        decoder: dict[str, Any] | None = byte_level | {"use_regex": True}
    elif kind == "words":
        strings = [f"w{i}" for i in range(vocab)]
        model = {"type": "WordLevel", "unk_token": "w0"}
        pre_tokenizer, decoder = {"type": "WhitespaceSplit"}, None
    else:
        raise ValueError(f"tokenizer must be 'bytes' or 'words', got {kind!r}")
    if swap is not None:
        first, second = swap
        strings[first], strings[second] = strings[second], strings[first]
    model["vocab"] = {string: i for i, string in enumerate(strings)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", config)


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in characters]
    characters |= {byte: chr(256 + i) for i, byte in enumerate(rest)}
    return [characters[byte] for byte in range(256)]


_BYTE_CHARACTERS = _byte_characters()


def _random_tensors(
    config: dict[str, Any], family: str, seed: int, std: float
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return std * torch.randn(rows, columns, generator=generator)

    def vector(size: int, mean: float) -> Tensor:
        return mean + 0.1 * torch.randn(size, generator=generator)

    norm_mean = 0.0 if family in tiny_families.GEMMA else 1.0
    mlp, mlp_norm, final_norm = tiny_families.NAMES.get(family, tiny_families.LLAMA_NAMES)
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    attention_bias = config.get("attention_bias", False)
    qkv_bias = family in tiny_families.QKV_BIAS or config.get("attention_bias", False)
    tensors = {EMBEDDING: matrix(config["vocab_size"], hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = matrix(rows, columns)
        if bias:
            tensors[f"{name}.bias"] = vector(rows, 0.0)

    def attention(at: str) -> None:
        linear(at + "self_attn.q_proj", q_size, hidden, qkv_bias)
        linear(at + "self_attn.k_proj", kv_size, hidden, qkv_bias)
        linear(at + "self_attn.v_proj", kv_size, hidden, qkv_bias)
        linear(at + "self_attn.o_proj", hidden, q_size, config.get("attention_bias", False))
        if family in tiny_families.QK_NORM:
            tensors[at + "self_attn.q_norm.weight"] = vector(head_dim, norm_mean)
            tensors[at + "self_attn.k_norm.weight"] = vector(head_dim, norm_mean)

    def latent_attention(at: str) -> None:
        for name, rows, columns in tiny_families.latent_attention(config):
            linear(f"{at}self_attn.{name}", rows, columns, "_a_" in name and attention_bias)
            if "_a_" in name:
                norm = f"{at}self_attn.{name[0:2].rstrip('_')}_a_layernorm.weight"
                tensors[norm] = vector(config["kv_lora_rank"] if name[0] == "k" else rows, 1.0)
        if attention_bias:
            tensors[f"{at}self_attn.o_proj.bias"] = vector(hidden, 0.0)

    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = vector(hidden, norm_mean)
        if "kv_lora_rank" in config:
            latent_attention(at)
        elif not tiny_families.is_recurrent(config, layer):
            attention(at)
        else:
            for name, mean, deviation, shape in tiny_families.mamba(config):
                noise = torch.randn(shape, generator=generator)
                tensors[f"{at}mamba.{name}"] = mean + (deviation or std) * noise
        tensors[f"{at}{mlp_norm}.weight"] = vector(hidden, norm_mean)
        if family in tiny_families.GEMMA:
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                tensors[f"{at}{name}.weight"] = vector(hidden, norm_mean)
        experts = tiny_families.sparse_mlp(config, layer)
        if experts is not None:
            tensors |= {f"{at}{name}.weight": matrix(*shape) for name, *shape in experts}
            if family == "deepseek_v3":
                bias = vector(config["n_routed_experts"], 0.0)
                tensors[f"{at}mlp.gate.e_score_correction_bias"] = bias
            continue
        for name in ("gate_proj", "up_proj"):
            linear(f"{at}{mlp}.{name}", ffn, hidden, config.get("mlp_bias", False))
        linear(f"{at}{mlp}.down_proj", hidden, ffn, config.get("mlp_bias", False))
    tensors[f"model.{final_norm}.weight"] = vector(hidden, norm_mean)
    if not config["tie_word_embeddings"]:
        tensors[HEAD] = matrix(config["vocab_size"], hidden)
    return tensors


def _copy_of(folder: str | Path, out: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a folder, with a head of its own; its tokenizer goes to ``out``."""
    folder, out = Path(folder), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder != out and (folder / name).exists():
            (out / name).write_bytes((folder / name).read_bytes())
    tensors = read_tensors(folder)
    tensors.setdefault(HEAD, tensors[EMBEDDING].clone())
    return read_json(folder / "config.json"), tensors


def _with_head(folder: str | Path, out: str | Path, change: Any) -> Path:
    config, tensors = _copy_of(folder, out)
    tensors[HEAD] = change(tensors[HEAD])
    return write_checkpoint(out, config | {"tie_word_embeddings": False}, tensors)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
