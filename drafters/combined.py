"""Two drafters for every row: lookup where its match is long, a model elsewhere and after it."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.ngram import NgramDrafter
from specdec.drafters.suffix import SuffixDrafter
from specdec.kernels.suffix import SuffixRule
from specdec.verifier.batch import PrefillBatch
from specdec.verifier.state import DecodeState, RowState

AnyDraft = TypeVar("AnyDraft")
LOOKUPS = ("ngram", "suffix")
# Matches of which lookup goes before the model: of the first drafts after such a match four in five
# were accepted, after one of three or four tokens two in five (docs/drafters.md).
LONG_MATCH = 5
SUFFIX_BEFORE_A_MODEL = SuffixRule(min_match=LONG_MATCH, min_share=50)


class CombinedDrafter(Drafter):
    """A row's leading drafts are those of ``first``, if it has any; ``second`` goes on from there.

    Both run in every step, over all rows, so a step costs what both cost. ``second`` reads what
    ``first`` has proposed as if it were its own: its KV is right on every row whatever the source,
    and nothing more has to catch up. Which of the two a draft came from is data too, and counted.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        """``second`` must have ``propose_after``."""
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        self.sources = (first.name, second.name)
        self.capturable = first.capturable and second.capturable
        self.catchup_width = second.catchup_width
        self.lookahead = second.lookahead
        self.feature_layers = second.feature_layers
        self.uses_adapters = second.uses_adapters
        self.is_recurrent = second.is_recurrent

    def propose(self, state: RowState, k: int) -> Draft:
        given = self.first.propose(state, k)
        assert isinstance(given, Draft) and given.probs is None
        draft = self.second.propose_after(state, k, given.ids)
        is_given = given.ids >= 0
        return Draft(
            given.ids.where(is_given, draft.ids),
            None if draft.probs is None else one_hot_where(is_given, given.ids, draft.probs),
            num_from_first=is_given.sum(1),
        )

    def keep_features(self, features: Tensor, slot_mapping: Tensor) -> None:
        self.second.keep_features(features, slot_mapping)

    def prefill(self, batch: PrefillBatch) -> None:
        self.second.prefill(batch)

    def advance(self, state: RowState, num_accepted: Tensor) -> None:
        self.second.advance(state, num_accepted)

    def catch_up(self, state: RowState) -> None:
        self.second.catch_up(state)

    def enter(self, row: int, group: str | None) -> None:
        self.first.enter(row, group)

    def learn(self, token_ids: Sequence[int], group: str) -> None:
        self.first.learn(token_ids, group)

    def refresh(self) -> None:
        self.first.refresh()

    def bytes_per_block(self, block_size: int) -> int:
        return self.second.bytes_per_block(block_size)

    def state_bytes(self, max_num_seqs: int, draft_width: int) -> int:
        return self.second.state_bytes(max_num_seqs, draft_width)

    def state_tensors(self) -> list[Tensor]:
        return self.second.state_tensors()

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        self.first.attach(state, num_blocks, draft_width)
        self.second.attach(state, num_blocks, draft_width)
        self.kv_lag = self.second.kv_lag


def one_hot_where(is_given: Tensor, ids: Tensor, probs: Tensor) -> Tensor:
    """``probs`` [R, k, V], but all of the weight on ``ids`` [R, k] where they are given."""
    one_hot = torch.zeros_like(probs).scatter_(2, ids.clamp_min(0)[..., None], 1.0)
    return one_hot.where(is_given[..., None], probs)


def split_names(draft: AnyDraft) -> tuple[str | None, AnyDraft | str]:
    """ "suffix+X" and "ngram+X" as the lookup's name and X; everything else as (None, itself).

    Raises ValueError where X cannot come second.
    """
    if not isinstance(draft, str):
        return None, draft
    first, plus, second = draft.partition("+")
    if not plus or first not in LOOKUPS:
        return None, draft
    if second in ("", "none", "auto") or second.partition("+")[0] in LOOKUPS:
        raise ValueError(
            f"draft={draft!r}: a model must follow {first}+, as layer_skip:N, eagle:PATH, "
            "medusa:PATH, mtp or the path of one"
        )
    return first, second


def make_lookup(name: str, history: int) -> Drafter:
    """The lookup that comes before a model."""
    if name == "ngram":
        return NgramDrafter(max_n=2 * LONG_MATCH, min_n=LONG_MATCH)
    return SuffixDrafter(history, SUFFIX_BEFORE_A_MODEL)
