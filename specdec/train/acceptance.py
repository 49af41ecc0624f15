"""Acceptance on held-out text, counted as the engine counts it.

Source of the counting rules: ``specdec.outputs.GenerationStats``.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec.train.corpus import Document
from specdec.train.loop import Trainee
from specdec.train.rows import PackedRows

HOW = (
    "Greedy, on held-out answers that the target wrote greedily, walked as an engine with this k "
    "would: the first token comes from the prompt; each step drafts min(k, what is left of the "
    "answer's budget - 1) tokens, keeps those that equal the target's text up to the first that "
    "does not, and adds one of the target's own. Drafts are made from the states of the training "
    "forward and from the weights as they were saved. by_position[i] = accepted at i / drafted at "
    "i; mean_tokens_per_step leaves the first token out."
)


# Equal to no id, and to no proposal that stands for none.
_PAST_THE_END = -2


@dataclass(slots=True)
class Acceptance:
    """What k drafts a step would have come to."""

    k: int
    drafted: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)  # by position
    steps: int = 0
    tokens: int = 0  # committed by steps
    documents: int = 0

    def __post_init__(self) -> None:
        self.drafted = self.drafted or [0] * self.k
        self.accepted = self.accepted or [0] * self.k

    @property
    def by_position(self) -> list[float]:
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [hits / count if count else 0.0 for hits, count in pairs]

    @property
    def mean_tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def add_step(self, num_drafted: int, num_accepted: int, num_committed: int) -> None:
        self.steps += 1
        self.tokens += num_committed
        for i in range(num_drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < num_accepted

    def as_dict(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "mean_tokens_per_step": self.mean_tokens_per_step,
            "by_position": self.by_position,
            "drafted_by_position": self.drafted,
            "accepted_by_position": self.accepted,
            "steps": self.steps,
            "tokens": self.tokens,
            "documents": self.documents,
        }


def measure(
    trainee: Trainee,
    rows: PackedRows,
    k: int,
    ends: Collection[int],
    *,
    rows_per_batch: int,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Acceptance:
    """Acceptance over all answers of ``rows``, which must be greedy, or over those time allows.

    ``ends``: tokens that end an answer; one that has none was cut at its budget.
    """
    result = Acceptance(k)
    for first in range(0, len(rows), rows_per_batch):
        if first and out_of_time():
            break
        numbers = list(range(first, min(first + rows_per_batch, len(rows))))
        batch = rows.batch(numbers)
        runs = leading_matches(trainee.proposals(batch, k), batch.tokens).tolist()
        for run, number in zip(runs, numbers, strict=True):
            for document, start in rows.rows[number].places:
                result.documents += 1
                walk(result, document, run[start : start + len(document.tokens)], ends)
    return result


def leading_matches(proposals: Tensor, tokens: Tensor) -> Tensor:
    """How many drafts from each position on are the text's tokens, [B, T] int64.

    proposals [B, T, k]; ``[:, i, j]`` is for token i + 2 + j. Runs may reach into the next
    document of a row; who walks a document cuts them there.
    """
    k = proposals.shape[-1]
    padded = torch.nn.functional.pad(tokens, (0, k + 1), value=_PAST_THE_END)
    ahead = padded[:, 2:].unfold(1, k, 1)  # [B, T, k]: tokens i + 2 .. i + 1 + k
    return (proposals == ahead).cumprod(dim=-1).sum(-1)


def walk(
    result: Acceptance, document: Document, runs: Sequence[int], ends: Collection[int]
) -> None:
    """Count one document's steps. ``runs``: ``leading_matches`` at each of its positions."""
    for start, end in document.spans:
        for committed, num_drafted, num_accepted, num_new in steps_of(
            document.tokens, start, end, runs, result.k, ends
        ):
            assert committed + num_new <= end
            result.add_step(num_drafted, num_accepted, num_new)


def steps_of(
    tokens: Sequence[int],
    start: int,
    end: int,
    runs: Sequence[int],
    k: int,
    ends: Collection[int],
) -> Iterator[tuple[int, int, int, int]]:
    """(length before the step, drafted, accepted, committed) of each step of one answer."""
    was_cut = tokens[end - 1] not in ends
    length = start + 1
    while length < end:
        num_drafted = min(k, end - length - 1) if was_cut else k
        num_accepted = min(runs[length - 2], num_drafted, end - length)
        num_new = min(num_accepted + 1, end - length)
        yield length, num_drafted, num_accepted, num_new
        length += num_new
