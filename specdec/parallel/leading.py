"""Rank 0's runner and adapter memory: each call is made on all ranks.

The others are told first and run beside rank 0, which waits for none of them here: the collectives
inside the calls bring them together.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specdec.adapter_memory import AdapterMemory
from specdec.drafters.base import Draft
from specdec.drafters.step_costs import StepCosts
from specdec.flatten import PromptChunk
from specdec.graphs import Progress
from specdec.outputs import StepRecord
from specdec.rows import RequestRow
from specdec.runner import Needs, Runner
from specdec.verifier.batch import PassResult, PendingResult
from specdec.verifier.lora import LoraSlots
from specdec.verifier.peft_format import AdapterError, AdapterWeights

# What the other ranks may be told, and of which object.
RUNNER_CALLS = (
    *("capture_all", "decode_costs", "enable_lora", "write_k", "write_blocks", "write_row"),
    *("tell_drafter", "teach_drafter", "decode", "mixed", "draft_apart", "verify_apart"),
)
MEMORY_CALLS = ("keep", "load", "forget")


class Others(Protocol):
    """The other ranks, as they are told what to do."""

    def tell(self, name: str, *args: Any) -> None: ...

    def ask(self, name: str, *args: Any) -> list[str | None]: ...


class LeadingRunner(Runner):
    """A runner that the others follow."""

    def __init__(self, others: Others, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._others = others
        self._news_for_drafter = False

    def capture_all(self, progress: Progress | None = None) -> None:
        self._others.tell("capture_all")
        super().capture_all(progress)

    def decode_costs(self, num_adapter_slots: int = 0) -> StepCosts:
        self._others.tell("decode_costs", num_adapter_slots)
        return super().decode_costs(num_adapter_slots)

    def enable_lora(self, num_slots: int) -> None:
        self._others.tell("enable_lora", num_slots)
        super().enable_lora(num_slots)

    def write_k(self, rows: list[int], ks: list[int]) -> None:
        self._others.tell("write_k", rows, ks)
        super().write_k(rows, ks)

    def write_blocks(self, entries: Sequence[tuple[int, int, list[int]]]) -> None:
        self._others.tell("write_blocks", entries)
        super().write_blocks(entries)

    def write_row(self, row: RequestRow) -> None:
        self._others.tell("write_row", row)
        super().write_row(row)

    def tell_drafter(self, entered: Sequence[tuple[int, str | None]]) -> None:
        if self.step.drafter is None or not (entered or self._news_for_drafter):
            return
        self._news_for_drafter = False
        self._others.tell("tell_drafter", entered)
        super().tell_drafter(entered)

    def teach_drafter(self, token_ids: Sequence[int], group: str) -> None:
        if self.step.drafter is not None:
            self._news_for_drafter = True
            self._others.tell("teach_drafter", token_ids, group)
            super().teach_drafter(token_ids, group)

    def decode(
        self, rows: list[int], k: int, needs: Needs, rounds: int = 1
    ) -> tuple[PendingResult, StepRecord]:
        self._others.tell("decode", rows, k, needs, rounds)
        return super().decode(rows, k, needs, rounds)

    def mixed(
        self,
        chunks: Sequence[PromptChunk],
        rows: list[int],
        k: int,
        needs: Needs,
        first_masks: np.ndarray | None = None,
    ) -> tuple[PendingResult | None, PendingResult | None, StepRecord]:
        self._others.tell("mixed", chunks, rows, k, needs, first_masks)
        return super().mixed(chunks, rows, k, needs, first_masks)

    def draft_apart(self, rows: list[int], k: int, needs: Needs) -> Draft:
        self._others.tell("draft_apart", rows, k, needs)
        return super().draft_apart(rows, k, needs)

    def verify_apart(
        self, ids: list[list[int]], k: int, needs: Needs, masks: np.ndarray
    ) -> tuple[PassResult, StepRecord]:
        self._others.tell("verify_apart", ids, k, needs, masks)
        return super().verify_apart(ids, k, needs, masks)


class LeadingMemory(AdapterMemory):
    """Adapter memory that the others follow, each with its own part of an adapter."""

    def __init__(self, others: Others, slots: LoraSlots, draft_slots: LoraSlots | None) -> None:
        super().__init__(slots, draft_slots)
        self._others = others

    def keep(
        self, key: str, weights: AdapterWeights, draft_weights: AdapterWeights | None = None
    ) -> None:
        super().keep(key, weights, draft_weights)
        # What a tensor of the base model's own is compared with lies in parts on all ranks.
        errors = self._others.ask("keep", key, weights, draft_weights)
        refused = [error for error in errors if error is not None]
        if refused:
            for each, error in enumerate(errors, 1):
                if error is None:
                    self._others.tell("forget_on", each, key)
            super().forget(key)
            raise AdapterError(refused[0])

    def load(self, slot: int, key: str) -> None:
        self._others.tell("load", slot, key)
        super().load(slot, key)

    def forget(self, key: str) -> None:
        self._others.tell("forget", key)
        super().forget(key)
