"""What is examined: a target and its drafter, as their files describe them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.drafters.combined import split_names
from specdec.tokenizer import Tokenizer, load_tokenizer
from specdec.verifier.hub import resolve_model
from specdec.verifier.loading import read_config
from specdec.verifier.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Side:
    """One model before its weights are loaded."""

    model: str | Path | None
    config: ModelConfig
    tokenizer: Tokenizer | None


@dataclass(frozen=True, slots=True)
class Subject:
    """A target and what drafts for it.

    Attributes:
        draft: what ``Engine`` is given: None, a name, a path, or a Drafter.
        lookup: "ngram" or "suffix" where one comes before another drafter, else None.
        draft_model: the files of a draft model; None for every other drafter.
    """

    target: Side
    draft: Any
    lookup: str | None
    draft_model: Side | None

    @property
    def draft_name(self) -> str:
        if self.draft is None or isinstance(self.draft, str | Path):
            return str(self.draft).lower() if self.draft is None else str(self.draft)
        return str(getattr(self.draft, "name", type(self.draft).__name__))


def read_side(model: str | Path | None) -> Side:
    """Raises what ``read_config`` and ``load_tokenizer`` raise."""
    path = resolve_model(model)
    return Side(model, read_config(path), load_tokenizer(path))


def read_subject(target: Side, draft: Any) -> Subject:
    """Look at the drafter's files, if it has any.

    Raises FileNotFoundError or ValueError for a draft model that cannot be read.
    """
    draft = "ngram" if draft == "auto" else draft
    lookup, second = split_names(draft)
    draft_model = read_side(second) if is_model(second) else None
    return Subject(target, draft, lookup, draft_model)


def is_model(draft: Any) -> bool:
    """It names the files of a draft model."""
    if not isinstance(draft, str | Path):
        return False
    text = str(draft)
    return text not in ("ngram", "suffix") and not text.startswith(("layer_skip", "eagle:"))
