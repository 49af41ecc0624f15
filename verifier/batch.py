"""What one launch works on: the prefill chunks of a step, and the packed results of a pass.

Shape letters: P requests that prefill, T tokens, R requests, Q query length.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.verifier.attention.base import AttentionMetadata
from specdec.verifier.sampling import Logprobs
from specdec.verifier.state import RowState


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillBatch:
    """Chunks of several prompts, flattened, and the rows of the requests they belong to."""

    rows: RowState  # the P requests
    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    metadata: AttentionMetadata
    ends: Tensor  # [P] int64: computed length of each request after this chunk
    sampling_rows: RowState | None  # the requests whose prompt ends here, or None
    last_token_rows: Tensor  # [rows that sample] int64: token row of each such prompt's last token


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyBatch:
    """The uniform rows of a pass: each row's last token and its drafts."""

    rows: RowState  # [R]
    draft_ids: Tensor  # [R, Q - 1] int64 in the vocabulary
    draft_probs: Tensor | None  # [R, Q - 1, V] float32
    num_drafted: Tensor  # [R] int64: leading drafts that count
    num_from_first: Tensor | None  # [R] int64: leading drafts of the first of two drafters
    allowed: Tensor | None  # [R, Q, ceil(V / 32)] int32: bit masks of what may stand there
    input_ids: Tensor  # [R * Q] int64
    positions: Tensor  # [R * Q] int64
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass committed, packed so that few copies bring it to the host.

    ``packed`` [R, Q + 4] int64 holds the tokens (-1 past the end), then the number committed,
    drafted and accepted, and 1 where the row failed. All are overwritten by the next replay. Of
    several rounds, all tensors have a dimension more behind the first.
    """

    packed: Tensor
    logprobs: Logprobs | None
    num_from_first: Tensor | None = None  # as in VerifyBatch

    @classmethod
    def pack(
        cls,
        tokens: Tensor,
        num_new: Tensor,
        num_drafted: Tensor,
        num_accepted: Tensor,
        failed: Tensor,
        logprobs: Logprobs | None,
    ) -> "PassResult":
        counts = torch.stack([num_new, num_drafted, num_accepted, failed.long()], dim=1)
        return cls(torch.cat([tokens, counts], dim=1), logprobs)

    @classmethod
    def of_rounds(cls, results: "list[PassResult]") -> "PassResult":
        """The results of rounds that ran one after the other, as one."""
        if len(results) == 1:
            return results[0]
        logprobs = [each.logprobs for each in results if each.logprobs is not None]
        from_first = [each.num_from_first for each in results if each.num_from_first is not None]
        return cls(
            torch.stack([each.packed for each in results], dim=1),
            Logprobs.stack(logprobs) if logprobs else None,
            torch.stack(from_first, dim=1) if from_first else None,
        )


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row of a PassResult, on the host."""

    token_ids: list[int]
    num_drafted: int
    num_accepted: int
    failed: bool
    # Per token: its log-probability, and ids and values of the likeliest tokens.
    logprobs: list[tuple[float, list[int], list[float]]] | None
    num_from_first: int  # leading drafts of the first of two drafters; 0 where there is but one

    @classmethod
    def unpack(
        cls,
        packed: list[int],
        logprobs: list[tuple[float, list[int], list[float]]] | None,
        num_from_first: int,
    ) -> "RowResult":
        *tokens, num_new, num_drafted, num_accepted, failed = packed
        ids = tokens[:num_new]
        return cls(ids, num_drafted, num_accepted, bool(failed), logprobs, num_from_first)


class PendingResult:
    """A launch's results on their way to the host: asynchronous copies, and one event to wait for.

    ``rounds``: passes of each row that it holds.
    """

    def __init__(
        self,
        result: PassResult,
        num_reqs: int,
        *,
        with_logprobs: bool,
        watch: Callable[[], None] | None = None,
    ) -> None:
        """
        with_logprobs: some row asked for them; else only ``packed`` is copied.
        watch: called again and again while the copies are waited for; may raise.
        """
        self._watch = watch
        self.rounds = result.packed.shape[1] if result.packed.dim() == 3 else 1
        self._tensors = [result.packed]
        self._has_sources = result.num_from_first is not None
        if result.num_from_first is not None:
            self._tensors.append(result.num_from_first)
        if with_logprobs and result.logprobs is not None:
            logprobs = result.logprobs
            self._tensors += [logprobs.chosen, logprobs.top_ids, logprobs.top]
        self._event: torch.cuda.Event | None = None
        self._tensors = [self._copy(tensor[:num_reqs]) for tensor in self._tensors]
        if result.packed.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @staticmethod
    def _copy(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def wait(self) -> float:
        """Until the copies are there. Returns the seconds that this took."""
        started = time.perf_counter()
        if self._event is not None:
            while self._watch is not None and not self._event.query():
                self._watch()
            self._event.synchronize()
        return time.perf_counter() - started

    def read(self) -> list[list[RowResult]]:
        """Wait for the copies. One entry per request, with one per round."""
        self.wait()
        # [R, rounds, ...]: of a single round they come without that dimension.
        tensors = [each if self.rounds > 1 else each[:, None] for each in self._tensors]
        packed, *more = (tensor.tolist() for tensor in tensors)
        none = [0] * self.rounds
        from_first = more.pop(0) if self._has_sources else [none] * len(packed)
        results = []
        for number, row in enumerate(packed):
            logprobs: list = [None] * self.rounds
            if more:
                of_row = (each[number] for each in more)
                logprobs = [list(zip(*each, strict=True)) for each in zip(*of_row, strict=True)]
            of_rounds = zip(row, logprobs, from_first[number], strict=True)
            results.append([RowResult.unpack(*each) for each in of_rounds])
        return results
