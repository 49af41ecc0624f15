"""Lookup by the longest matching suffix, in the request's own text and in earlier outputs.

Source: after Oliaro et al., "SuffixDecoding", 2024 (arXiv 2411.04975).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.drafters.base import Draft, Drafter
from specdec.drafters.history import TextHistory
from specdec.kernels.suffix import SuffixHistory, SuffixRule, propose_suffix
from specdec.verifier.state import DecodeState, RowState

DEFAULT_HISTORY = 2**16
# The search works with 32-bit products of a place and a number of parts.
MAX_HISTORY = 2**24


class SuffixDrafter(Drafter):
    """Continues the text as it went on where its last tokens stood before; the longest match wins.

    It looks in the request's own text and in the outputs of requests that have ended, of the same
    adapter and version only. What it finds there decides how much is accepted, never the text. The
    arrays that the step searches keep their addresses; they are written between two steps, when a
    text has ended.
    """

    name = "suffix"
    capturable = True

    def __init__(self, history: int = DEFAULT_HISTORY, rule: SuffixRule = SuffixRule()) -> None:
        """``history``: tokens of earlier outputs to keep, at 8 bytes each; 0 keeps none."""
        if not 0 <= history <= MAX_HISTORY:
            raise ValueError(f"history must be between 0 and {MAX_HISTORY} tokens, got {history}")
        if not 1 <= rule.min_match <= rule.max_match:
            raise ValueError(
                f"suffix needs 1 <= min_match <= max_match, got min_match={rule.min_match}, "
                f"max_match={rule.max_match}"
            )
        self.rule = rule
        self.texts = TextHistory(history, rule.max_match)
        self.arrays: SuffixHistory | None = None
        self._groups: list[str | None] = []
        self._bounds: dict[str, tuple[int, int]] = {}
        self._texts_changed = self._rows_changed = False

    def attach(self, state: DecodeState, num_blocks: int, draft_width: int) -> None:
        device, num_rows = state.device, state.max_num_seqs + 1
        self._groups = [None] * num_rows
        self.arrays = SuffixHistory(
            pool=torch.from_numpy(self.texts.pool).to(device, copy=True),
            order=torch.zeros(max(1, self.texts.capacity), dtype=torch.int32, device=device),
            bounds=torch.zeros(num_rows, 2, dtype=torch.int32, device=device),
        )

    def propose(self, state: RowState, k: int) -> Draft:
        assert self.arrays is not None
        text = state.state.tokens[:, : state.state.max_model_len]
        lengths = state.state.seq_len
        return Draft(propose_suffix(text, lengths, state.slots, self.arrays, k, self.rule))

    def enter(self, row: int, group: str | None) -> None:
        self._groups[row] = group
        self._rows_changed = True

    def learn(self, token_ids: Sequence[int], group: str) -> None:
        self._texts_changed |= self.texts.add(token_ids, group)

    def refresh(self) -> None:
        assert self.arrays is not None
        if self._texts_changed:
            order, self._bounds = self.texts.flatten()
            _upload(self.arrays.pool, self.texts.pool)
            _upload(self.arrays.order[: len(order)], order)
        if self._texts_changed or self._rows_changed:
            nothing = (0, 0)
            bounds = [
                self._bounds.get(group, nothing) if group is not None else nothing
                for group in self._groups
            ]
            _upload(self.arrays.bounds, np.array(bounds, np.int32))
        self._texts_changed = self._rows_changed = False


def _upload(target: Tensor, source: np.ndarray) -> None:
    host = torch.from_numpy(source)
    if target.is_cuda:
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
