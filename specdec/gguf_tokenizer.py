"""A byte-level BPE tokenizer from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from specdec.verifier.gguf_file import GGUFFile
from specdec.verifier.models.config import UnsupportedModelError

# Kinds of tokens, as tokenizer.ggml.token_type numbers them.
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Names of tokenizer.ggml.pre -> how text is cut into words.
_ALIASES = {
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
}
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(
    file: GGUFFile,
) -> tuple[tokenizers.Tokenizer, dict[str, str], str | None]:
    """The tokenizer, its special tokens by name, and the chat template if there is one.

    Raises UnsupportedModelError naming a tokenizer model or pre-tokenizer that is not known.
    """
    meta = file.metadata
    model = meta.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise UnsupportedModelError(
            f"{file.path}: GGUF tokenizer model {model!r} is not supported; supported: gpt2 (BPE)"
        )
    name = meta.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _ALIASES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF pre-tokenizer {name!r} is not supported; supported: "
            f"{', '.join(_ALIASES)}"
        )
    kind = _ALIASES[name]
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    # Converters fill a padded vocabulary with unused tokens at its end.
    size = len(tokens)
    while size and types[size - 1] == UNUSED:
        size -= 1
    tokens = tokens[:size]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in meta["tokenizer.ggml.merges"]],
            ignore_merges=kind == "llama-bpe",
        )
    )
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    for add, wanted in ((backend.add_special_tokens, CONTROL), (backend.add_tokens, USER_DEFINED)):
        kinds = zip(tokens, types, strict=False)
        add([AddedToken(token, normalized=False) for token, kind_ in kinds if kind_ == wanted])
    special_tokens = {
        name: tokens[meta[f"tokenizer.ggml.{field}"]]
        for name, field in _SPECIAL_IDS.items()
        if meta.get(f"tokenizer.ggml.{field}", len(tokens)) < len(tokens)
    }
    _add_bos(backend, meta, special_tokens, kind)
    return backend, special_tokens, meta.get("tokenizer.chat_template")


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = Regex(_WORDS % ("{1,3}" if kind == "llama-bpe" else ""))
    split = pre_tokenizers.Split(pattern, behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


def _add_bos(
    backend: tokenizers.Tokenizer,
    meta: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    kind: str,
) -> None:
    bos = special_tokens.get("bos_token")
    if bos is None or not meta.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
        return
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, meta["tokenizer.ggml.bos_token_id"])]
            ),
        ]
    )


def _pair(merge: str) -> tuple[str, str]:
    """The two halves of a merge; byte-level tokens have no space of their own."""
    left, _, right = merge.partition(" ")
    return left, right
