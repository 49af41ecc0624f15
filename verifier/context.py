"""The forward context: what the code under a step may know about the step it is part of.

Graph wrappers and opaque ops are called from inside a compiled model and cannot take another
argument, so this is the project's one piece of global state. It is set only here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from specdec.verifier.modes import BatchDescriptor, CUDAGraphMode
from specdec.verifier.tensor_tree import map_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardContext:
    """What ``CudagraphDispatcher.dispatch`` decided for this step, and what its attention reads."""

    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None  # padded; needed unless the mode is NONE
    variant: str = "greedy"
    rounds: int = 1
    attn_metadata: Any = None  # an AttentionMetadata; the model's opaque attention op reads it
    kv_cache: Any = None  # the KVCache that op writes and reads
    attn_backend: Any = None  # the AttentionBackend that op calls

    def __post_init__(self) -> None:
        if not self.cudagraph_runtime_mode.is_valid_runtime_mode():
            raise ValueError(
                f"cudagraph_runtime_mode must be NONE, PIECEWISE or FULL, "
                f"not {self.cudagraph_runtime_mode}"
            )
        if self.cudagraph_runtime_mode is not CUDAGraphMode.NONE and self.batch_descriptor is None:
            raise ValueError(f"{self.cudagraph_runtime_mode} needs a batch_descriptor")


# A context variable, so that engines in different threads do not see each other's steps.
_current: ContextVar[ForwardContext] = ContextVar("specdec_forward_context")


@contextmanager
def set_forward_context(
    *,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    variant: str = "greedy",
    rounds: int = 1,
    attn_metadata: Any = None,
    kv_cache: Any = None,
    attn_backend: Any = None,
) -> Iterator[ForwardContext]:
    """Holds for the ``with`` block; nests, and gives the outer context back however it ends."""
    context = ForwardContext(
        cudagraph_runtime_mode=cudagraph_runtime_mode,
        batch_descriptor=batch_descriptor,
        variant=variant,
        rounds=rounds,
        attn_metadata=attn_metadata,
        kv_cache=kv_cache,
        attn_backend=attn_backend,
    )
    with use_forward_context(context):
        yield context


@contextmanager
def use_forward_context(context: ForwardContext) -> Iterator[None]:
    """Sets a context that exists already: a recorded graph replays under its capture's."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The innermost context. Raises ``RuntimeError`` outside every ``set_forward_context``."""
    try:
        return _current.get()
    except LookupError:
        raise RuntimeError("no forward context: call inside set_forward_context(...)") from None


def frozen_forward_context() -> ForwardContext | None:
    """A copy of the current context, None outside every one: what a recorded graph replays under.

    The containers in it are copied too and their tensors kept, so that a later change to a plain
    value in the metadata does not reach into a graph.
    """
    context = _current.get(None)
    return None if context is None else map_tensors(context, lambda tensor: tensor)
