"""What a graph cannot hold, told by the operator's name before it is executed.

A CUDA capture that meets such an operator ends in an error that names nothing and can leave the
allocator in disorder, and a recording on the CPU would freeze a value without a word. So both ways
to capture run under ``StrictCapture``, which raises ``CaptureError`` first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.verifier.capture import CaptureError

HOST_READ = "reads device values on the host"
DATA_DEPENDENT_SHAPE = "makes a tensor whose shape depends on values"
HOST_DATA = "copies from pageable host memory"
FROZEN_RNG = "draws from a random generator, whose state a graph freezes; use counter-based noise"
MOVES_MEMORY = "changes the address of a tensor that other code holds"

aten = torch.ops.aten
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Functions that answer without going through the dispatcher, or under a less telling name there.
_REFUSED_FUNCTIONS: dict[Callable[..., Any], str] = {
    **dict.fromkeys(
        (
            Tensor.item,
            Tensor.tolist,
            Tensor.numpy,
            Tensor.cpu,
            Tensor.__array__,
            Tensor.__bool__,
            Tensor.__int__,
            Tensor.__float__,
            Tensor.__complex__,
            Tensor.__index__,
            Tensor.__dlpack__,
            Tensor.__format__,
            Tensor.__repr__,
        ),
        HOST_READ,
    ),
    **dict.fromkeys((torch.tensor, Tensor.new_tensor), HOST_DATA),
}
_REFUSED_UNLESS_TENSOR = (torch.as_tensor, torch.asarray)
_INDEXING = (Tensor.__getitem__, Tensor.__setitem__)

_HOST_READS = {"aten::equal"}
_RNG = {"aten::random", "aten::random_", "aten::uniform_"}  # not tagged as random by PyTorch
_MOVES_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}


class CallLog(Protocol):
    """Follows a strict capture: the recorder's side of it."""

    def before_call(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """An operator that the captured function calls is about to run."""

    def before_write(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        """A primitive operator that writes to an argument is about to run."""

    def after_call(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        """The operator of the last ``before_call`` has run."""


@contextmanager
def strict_capture(log: CallLog | None = None) -> Iterator[None]:
    """Refuses what a graph cannot hold, under ``torch.inference_mode``."""
    with torch.inference_mode(), _StrictFunctions(), _StrictDispatch(log):
        yield


class _StrictFunctions(TorchFunctionMode):
    """Sees calls as they are written in Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reason = _REFUSED_FUNCTIONS.get(func)
        if reason is None and func in _REFUSED_UNLESS_TENSOR:
            reason = None if args and isinstance(args[0], Tensor) else HOST_DATA
        if reason is None and func is Tensor.to:
            # A device object may be the tensor's own; the word is meant.
            reason = HOST_READ if "cpu" in (*args[1:], kwargs.get("device")) else None
        if reason is None and func in _INDEXING and _has_list(args[1]):
            reason = HOST_DATA
        if reason is not None:
            _refuse(_function_name(func), reason)
        if func is Tensor.data.__get__:  # type: ignore[attr-defined]
            # The plain getter bypasses the dispatcher, and the result would look static.
            return args[0].detach()
        return func(*args, **kwargs)


class _StrictDispatch(TorchDispatchMode):
    """Sees every operator, those inside composite ones too; the log is told of the outer ones."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True, the default, imports all of torch.compile at the first operator: most of a second.
        return False

    def __init__(self, log: CallLog | None) -> None:
        super().__init__()
        self._log = log
        self._composites: list[OpOverload] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        outer = not self._composites
        if self._log is not None and outer:
            self._log.before_call(func, args, kwargs)

        if _is_composite(func):
            self._composites.append(func)
            try:
                with self:
                    result = func._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                self._composites.pop()
        else:
            reason = _refusal(func, args, kwargs)
            if reason is not None:
                _refuse(" in ".join(map(_op_name, (func, *reversed(self._composites)))), reason)
            if self._log is not None and func._schema.is_mutable:
                self._log.before_write(func, args, kwargs)
            result = func(*args, **kwargs)

        if self._log is not None and outer:
            self._log.after_call(func, args, kwargs, result)
        return result


def _refusal(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Why a graph cannot hold this call of a primitive operator, or None if it can."""
    rule = _rule(func)
    return rule(args, kwargs) if callable(rule) else rule


@cache
def _rule(func: OpOverload) -> str | Callable[[tuple, dict[str, Any]], str | None] | None:
    """A reason if ``func`` is always refused, a function of the call if it depends, or None."""
    name = func._schema.name
    if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
        return _mask_index
    if func in (aten.copy_.default, aten._to_copy.default):
        return _host_copy
    if func is aten.repeat_interleave.Tensor:
        return lambda args, kwargs: (
            DATA_DEPENDENT_SHAPE if kwargs.get("output_size") is None else None
        )
    if torch.Tag.data_dependent_output in func.tags or name in _HOST_READS:
        return HOST_READ
    if torch.Tag.dynamic_output_shape in func.tags:
        return DATA_DEPENDENT_SHAPE
    if name == "aten::lift_fresh":
        # A plain number, as in ``x[0] = 5``, is baked into a kernel's arguments on a GPU.
        return lambda args, kwargs: HOST_DATA if args[0].dim() else None
    if name in _MOVES_MEMORY:
        return MOVES_MEMORY
    if torch.Tag.nondeterministic_seeded in func.tags or name in _RNG:
        names = [argument.name for argument in func._schema.arguments]
        if "dropout_p" not in names:
            return FROZEN_RNG
        place = names.index("dropout_p")
        return lambda args, kwargs: (
            FROZEN_RNG
            if (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
            else None
        )
    return None


def _mask_index(args: tuple, kwargs: dict[str, Any]) -> str | None:
    masks = (torch.bool, torch.uint8)
    if any(index is not None and index.dtype in masks for index in args[1]):
        return DATA_DEPENDENT_SHAPE
    if any(index is not None and index.device != args[0].device for index in args[1]):
        return HOST_DATA
    return None


def _host_copy(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Copies between host and device: only to and from pinned memory, into a tensor in place."""
    if len(args) > 1:
        target, source = args[0], args[1]
        host = [t for t in (target, source) if t.device.type == "cpu"]
        crosses = target.device != source.device
        return HOST_DATA if crosses and host and not host[0].is_pinned() else None
    wanted = kwargs.get("device") or args[0].device
    if wanted.type == args[0].device.type:
        return None
    return HOST_READ if wanted.type == "cpu" else HOST_DATA


@cache
def _is_composite(func: OpOverload) -> bool:
    """``func`` is made of other operators on every device, so that what it calls can be seen."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    if not has_kernel(name, "CompositeImplicitAutograd"):
        return False
    return not (has_kernel(name, "CPU") or has_kernel(name, "CUDA"))


def _has_list(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(isinstance(part, (list, range)) for part in index)
    return isinstance(index, (list, range))


def _refuse(name: str, reason: str) -> None:
    raise CaptureError(f"{name} cannot be captured: it {reason}")


def _op_name(func: OpOverload) -> str:
    return str(func).removesuffix(".default")


def _function_name(func: Any) -> str:
    owner = "Tensor" if getattr(Tensor, func.__name__, None) is func else "torch"
    return f"{owner}.{func.__name__}"
