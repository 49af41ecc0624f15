"""What can be captured: the kinds of uniform passes of an engine, and the keys of their graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.drafters.base import Draft
from specdec.verifier.batch import PassResult
from specdec.verifier.dispatcher import CudagraphDispatcher
from specdec.verifier.graph import CUDAGraphWrapper
from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode
from specdec.verifier.planner import KeyGroup

PassOutput = PassResult | Draft | Tensor


@dataclass(eq=False, slots=True)
class UniformPass:
    """One kind of uniform pass: what it runs, its graphs, and which of them exist."""

    role: str
    # num_reqs, k, sampled, has_lora, and rounds where there are several
    run: Callable[..., PassOutput]
    wrapper: CUDAGraphWrapper
    dispatcher: CudagraphDispatcher
    reads_adapters: bool  # else it runs as for base rows, whatever rows are in the batch
    at_start: bool  # its greedy graphs are captured before the first request
    round_variants: tuple[str, ...]  # so are those of several rounds, of these variants


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """One graph to capture: of a pass, or (``of`` None) of the model over flattened batches."""

    of: UniformPass | None
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    rounds: int = 1

    @property
    def variants(self) -> tuple[str, ...]:
        """Those to capture at start-up."""
        if self.of is None or self.rounds == 1:
            return ("greedy",)
        return self.of.round_variants

    def __str__(self) -> str:
        role = "target" if self.of is None else self.of.role
        shape = self.descriptor
        times = f"{self.rounds} rounds of " if self.rounds > 1 else ""
        sizes = f"{shape.num_tokens} tokens, {shape.num_reqs} requests"
        adapters = " with adapters" if shape.has_lora else ""
        return f"{role} {self.mode} of {times}{sizes}{adapters}"


def groups_of(keys: Sequence[CaptureKey]) -> list[KeyGroup[CaptureKey]]:
    """Keys that take memory alike: of one pass, query length and kind of adapters."""
    found: dict[tuple, list[CaptureKey]] = {}
    for key in keys:
        shape = key.descriptor
        query_len = shape.query_len if shape.uniform else 0
        role = "" if key.of is None else key.of.role
        kind = (role, key.mode, query_len, shape.has_lora, key.rounds)
        found.setdefault(kind, []).append(key)
    return [KeyGroup(group) for group in found.values()]
