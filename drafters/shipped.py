"""Draft heads that come with the package, and which model each was trained for.

A folder ``heads/<name>/`` beside this file holds a head as ``eagle:PATH`` reads it and a
``target.json``, as ``describe_target`` writes it.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from specdec.verifier.models.config import ModelConfig, read_json_object

HEADS = Path(__file__).parent / "heads"
TARGET = "target.json"


class Vocabulary(Protocol):
    """A tokenizer's string of each id, None for an id that does not exist."""

    @property
    def strings(self) -> Sequence[str | None]: ...


def describe_target(config: ModelConfig, tokenizer: Vocabulary) -> dict[str, Any]:
    """What tells a model from others: the shape of its weights and the content of its tokenizer."""
    strings = json.dumps(list(tokenizer.strings), ensure_ascii=True)
    return {
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "tokenizer": hashlib.sha256(strings.encode()).hexdigest(),
    }


def auto_draft(config: ModelConfig, tokenizer: Vocabulary | None, heads: Path | None = None) -> str:
    """What ``draft="auto"`` stands for: the head shipped for this model, else prompt lookup.

    A model without a tokenizer cannot be told from others of its shape. ``heads``: the folder of
    the package's heads unless given.
    """
    described = None if tokenizer is None else describe_target(config, tokenizer)
    for path in sorted((heads or HEADS).glob(f"*/{TARGET}")):
        if described is not None and read_json_object(path) == described:
            return f"eagle:{path.parent}"
    return "ngram"
