"""What is examined: a target and its drafter, as their files describe them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.build_drafter import check_draft
from specdec.config import EngineConfig
from specdec.drafters.combined import split_names
from specdec.drafters.shipped import auto_draft
from specdec.heads import open_head
from specdec.sources import Source, read_source
from specdec.verifier.models.llama import CausalLM


@dataclass(frozen=True, slots=True)
class Subject:
    """A target and what drafts for it.

    Attributes:
        draft: what ``Engine`` is given: None, a name, a path, or a Drafter.
        draft_model: the files of a draft model; None for every other drafter.
        head: the files of a head for the target; None for every other drafter.
    """

    target: Source
    draft: Any
    draft_model: Source | None = None
    head: Source | None = None

    @property
    def draft_name(self) -> str:
        if self.draft is None or isinstance(self.draft, str | Path):
            return "none" if self.draft is None else str(self.draft)
        return str(getattr(self.draft, "name", type(self.draft).__name__))


def read_subject(target: Source, draft: Any, config: EngineConfig) -> Subject:
    """Look at the drafter's files, if it has any.

    Raises FileNotFoundError or ValueError for a drafter that cannot be read or does not fit. A
    draft model is only read: what of it must agree with the target is for checks to say.
    """
    draft = auto_draft(target.config, target.tokenizer) if draft == "auto" else draft
    _, second = split_names(draft)
    if _names_a_model(second, target):
        return Subject(target, draft, draft_model=read_source(second, config))
    return Subject(target, draft, head=check_draft(second, target, config))


def _names_a_model(draft: Any, target: Source) -> bool:
    if isinstance(draft, CausalLM):
        return True
    if not isinstance(draft, str | Path) or draft in ("ngram", "suffix"):
        return False
    text = str(draft)
    if text in ("", "none") or text.startswith("layer_skip"):
        return False
    return open_head(text, target.config, target.model) is None
