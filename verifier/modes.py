"""The vocabulary of the graph system: modes, batch shapes, graph keys and what a backend supports.

The terms are vLLM's. Nothing here imports torch.
"""

import enum
import logging
from collections.abc import Iterable
from typing import NamedTuple, Self

logger = logging.getLogger(__name__)

ROLES = ("step", "target", "draft_catchup", "draft_decode")
VARIANTS = ("greedy", "sampled")


class CUDAGraphMode(enum.Enum):
    """Which batches replay a graph, and which kind.

    ``NONE``, ``PIECEWISE`` and ``FULL`` are what one step runs as (runtime modes); as a setting
    they hold for every batch. The two pairs treat batches apart: (uniform decode, all others).
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    @classmethod
    def parse(cls, value: "str | int | CUDAGraphMode") -> Self:
        """The mode called ``value``, in any case, or of that number, 0 to 2, as in vLLM.

        Raises ``ValueError`` for an unknown one.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls[value.upper()]
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2:
            return cls(value)
        names = ", ".join(cls.__members__)
        raise ValueError(f"cudagraph_mode must be one of {names}, not {value!r}")

    def separate_routine(self) -> bool:
        """Uniform decode batches and all others are treated apart."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "CUDAGraphMode":
        """The runtime mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.separate_routine() else self

    def mixed_mode(self) -> "CUDAGraphMode":
        """The runtime mode of all other batches (a prompt among them, or unequal lengths)."""
        return CUDAGraphMode(self.value[1]) if self.separate_routine() else self

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Some batch runs as ``mode``, which must be a runtime mode."""
        assert mode.is_valid_runtime_mode(), mode
        return mode in (self.decode_mode(), self.mixed_mode())

    def max_cudagraph_mode(self) -> "CUDAGraphMode":
        """The strongest runtime mode that some batch gets: FULL > PIECEWISE > NONE."""
        return max(self.decode_mode(), self.mixed_mode(), key=lambda mode: mode.value)

    def has_full_cudagraphs(self) -> bool:
        return self.has_mode(CUDAGraphMode.FULL)

    def has_piecewise_cudagraphs(self) -> bool:
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def requires_piecewise_compilation(self) -> bool:
        return self.has_mode(CUDAGraphMode.PIECEWISE)

    def is_valid_runtime_mode(self) -> bool:
        """A single step can run as this mode."""
        return not self.separate_routine()

    def __str__(self) -> str:
        return self.name


class AttentionCGSupport(enum.IntEnum):
    """Which batches of an attention backend a CUDA graph can hold. Larger includes smaller."""

    ALWAYS = 3
    UNIFORM_BATCH = 2  # all requests have the same query length
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # all requests have query length 1
    NEVER = 0


class BatchDescriptor(NamedTuple):
    """The shape of a batch: as it came from the scheduler, or padded to a captured graph's."""

    num_tokens: int
    num_reqs: int
    uniform: bool = False  # all requests have query length num_tokens // num_reqs
    has_lora: bool = False

    @property
    def query_len(self) -> int:
        """Query length of every request of a uniform batch."""
        assert self.uniform, self
        return self.num_tokens // self.num_reqs

    def relaxed(self) -> "BatchDescriptor":
        """What a PIECEWISE graph is keyed by: tokens and adapters; ``num_reqs`` 0 means any."""
        return BatchDescriptor(self.num_tokens, 0, False, self.has_lora)


class GraphKey(NamedTuple):
    """What one captured graph is kept under."""

    role: str  # one of ROLES
    descriptor: BatchDescriptor
    variant: str = "greedy"  # one of VARIANTS
    rounds: int = 1  # steps (draft, verify, accept, advance) in one replay


def resolve_cudagraph_mode(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    uniform_query_len: int,
    piecewise_available: bool,
) -> CUDAGraphMode:
    """The mode to serve where ``mode`` was asked for. A downgrade is logged as one warning.

    ``support`` is the least of the model's layers; ``uniform_query_len`` is ``1 + k``. The rules:
    FULL for every batch needs ALWAYS, else only uniform decode gets FULL; FULL for uniform decode
    needs UNIFORM_BATCH (or UNIFORM_SINGLE_TOKEN_DECODE at query length 1); PIECEWISE needs
    piecewise compilation; what is left is PIECEWISE where it is available, or NONE.
    """
    served, reasons = _resolve(mode, support, uniform_query_len, piecewise_available)
    _warn_downgrade(mode, served, reasons)
    return served


def resolve_uniform_query_lens(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    uniform_query_lens: Iterable[int],
    piecewise_available: bool,
) -> tuple[CUDAGraphMode, tuple[int, ...]]:
    """``resolve_cudagraph_mode`` for an engine with several ``k`` side by side.

    Returns the mode to serve and the query lengths that keep FULL graphs under it: a backend with
    single-token support loses those of ``k > 0`` and keeps ``k = 0``. At most one warning.
    """
    resolved = {
        query_len: _resolve(mode, support, query_len, piecewise_available)
        for query_len in sorted(set(uniform_query_lens))
    }
    if not resolved:
        raise ValueError("uniform_query_lens must not be empty")
    kept = tuple(q for q, (served, _) in resolved.items() if served.has_full_cudagraphs())
    # Support only falls with the query length, so the shortest is served best.
    served = next(iter(resolved.values()))[0]
    _warn_downgrade(mode, served, downgrade_reasons(mode, support, resolved, piecewise_available))
    return served, kept


def downgrade_reasons(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    uniform_query_lens: Iterable[int],
    piecewise_available: bool,
) -> list[str]:
    """Why ``resolve_uniform_query_lens`` serves less than ``mode``; empty where it does not."""
    reasons = [
        why
        for query_len in sorted(set(uniform_query_lens))
        for why in _resolve(mode, support, query_len, piecewise_available)[1]
    ]
    return list(dict.fromkeys(reasons))


class Downgrade(NamedTuple):
    """That less is served than was asked for, and why: by query length."""

    asked: CUDAGraphMode
    reasons: dict[int, str]

    @classmethod
    def of(
        cls,
        mode: CUDAGraphMode,
        support: AttentionCGSupport,
        uniform_query_lens: Iterable[int],
        piecewise_available: bool,
    ) -> "Downgrade":
        """What ``resolve_uniform_query_lens`` takes away."""
        resolved = {q: _resolve(mode, support, q, piecewise_available) for q in uniform_query_lens}
        return cls(mode, {q: ", ".join(whys) for q, (_, whys) in resolved.items() if whys})


def _resolve(
    mode: CUDAGraphMode,
    support: AttentionCGSupport,
    uniform_query_len: int,
    piecewise_available: bool,
) -> tuple[CUDAGraphMode, list[str]]:
    """The mode to serve, and the reasons where it is not ``mode``."""
    if uniform_query_len < 1:
        raise ValueError(f"uniform_query_len must be at least 1, not {uniform_query_len}")
    reasons: list[str] = []

    if mode is CUDAGraphMode.FULL and support < AttentionCGSupport.ALWAYS:
        reasons.append(f"FULL for mixed batches needs attention support ALWAYS, not {support.name}")
        mode = CUDAGraphMode.FULL_AND_PIECEWISE

    needed = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if uniform_query_len == 1
        else AttentionCGSupport.UNIFORM_BATCH
    )
    if mode.decode_mode() is CUDAGraphMode.FULL and support < needed:
        reasons.append(
            f"FULL for query length {uniform_query_len} needs attention support {needed.name}, "
            f"not {support.name}"
        )
        mode = CUDAGraphMode.PIECEWISE

    if mode.requires_piecewise_compilation() and not piecewise_available:
        reasons.append("PIECEWISE needs piecewise compilation, which is not available")
        keeps_full = mode.has_full_cudagraphs()
        mode = CUDAGraphMode.FULL_DECODE_ONLY if keeps_full else CUDAGraphMode.NONE
    return mode, reasons


def _warn_downgrade(asked: CUDAGraphMode, served: CUDAGraphMode, reasons: list[str]) -> None:
    if reasons:
        logger.warning(
            "cudagraph_mode %s was asked for, %s is served: %s", asked, served, "; ".join(reasons)
        )
