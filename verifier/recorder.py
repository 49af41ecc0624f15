"""Graphs where there is no GPU: records a call's operators once and replays the list.

It exists so that dispatch, capture, stale-value and padding faults show up on a CPU. It is as
strict as a CUDA capture: what a graph cannot hold is refused (``capture_rules.py``), static tensors
are known by identity, every plain value is frozen, a capture leaves no trace in existing tensors,
and a replay sees nothing of the live program but the contents of static tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from specdec.verifier.capture import CaptureError
from specdec.verifier.capture_rules import strict_capture
from specdec.verifier.context import ForwardContext, frozen_forward_context, use_forward_context
from specdec.verifier.tensor_tree import map_tensors

aten = torch.ops.aten
_log_numbers = count()
_SLOT = "_specdec_slot"  # attribute of a tensor that a capture made: (number of the log, slot)

# A place in the arguments of a step (a list or dict, and where in it) and the slot put there.
Patch = tuple[Any, int | str, int]


class RecorderBackend:
    """The ``CaptureBackend`` of every device but CUDA."""

    def capture(self, fn: Callable[[], Any]) -> "Recording":
        log = _Log()
        context = frozen_forward_context()
        try:
            with _under(context), strict_capture(log):
                result = fn()
            with torch.inference_mode():
                return log.finish(result, context)
        finally:
            log.undo_writes()

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()


class Recording:
    """A list of operator calls. Outputs are copied into buffers made at capture."""

    def __init__(
        self,
        steps: "list[_Step]",
        num_slots: int,
        buffers: list[tuple[Tensor, int]],
        outputs: Any,
        context: ForwardContext | None,
    ) -> None:
        self.outputs = outputs
        self.num_bytes = sum(buffer.nbytes for buffer, _ in buffers)
        self._steps = steps
        self._num_slots = num_slots
        self._buffers = buffers
        self._context = context

    def replay(self) -> None:
        slots: list[Any] = [None] * self._num_slots
        with _under(self._context), torch.inference_mode():
            for step in self._steps:
                for container, place, slot in step.patches:
                    container[place] = slots[slot]
                result = step.func(*step.args, **step.kwargs)
                if step.result is not None:
                    slots[step.result] = result
                for place, slot in step.results:
                    slots[slot] = result[place]
                for container, place, _ in step.patches:
                    container[place] = None
                for slot in step.last_uses:
                    slots[slot] = None
            for buffer, slot in self._buffers:
                buffer.copy_(slots[slot])

    def hand_over_outputs(self) -> Any:
        return self.outputs

    def __str__(self) -> str:
        return "\n".join(map(str, self._steps))


@dataclass(kw_only=True, slots=True)
class _Step:
    """One operator call. The places named in ``patches`` are filled before it and emptied after."""

    func: OpOverload
    args: list[Any]
    kwargs: dict[str, Any]
    patches: list[Patch]
    result: int | None  # the slot of a result that is one tensor
    results: list[tuple[int, int]]  # (place, slot) of the tensors in a result that is a sequence
    last_uses: list[int]  # slots that no later step reads

    def __str__(self) -> str:
        reads = [slot for _, _, slot in self.patches]
        writes = [slot for _, slot in self.results] if self.result is None else [self.result]
        return f"{self.func}: {reads} -> {writes}"


class _Log:
    """Follows a capture. A tensor is static, or the result of a recorded step and has a slot.

    A slot's number is kept on the tensor itself, next to the log it belongs to, so that it is gone
    with the tensor and means nothing to a later capture.
    """

    def __init__(self) -> None:
        self._number = next(_log_numbers)
        self._steps: list[_Step] = []
        self._num_slots = 0
        # Storages that existed before the capture, by address. Held, so that none is reused.
        self._static: dict[int, torch.UntypedStorage] = {}
        self._pending: _Step | None = None
        self._writes = _Writes()

    def before_call(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        step = _Step(
            func=func,
            args=list(args),
            kwargs=dict(kwargs),
            patches=[],
            result=None,
            results=[],
            last_uses=[],
        )
        self._bind(step, step.args, range(len(args)))
        self._bind(step, step.kwargs, kwargs)
        self._pending = step

    def before_write(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
        for target in _written(func, args, kwargs):
            if self._is_static(target):
                self._writes.save(func, args, target)

    def after_call(
        self, func: OpOverload, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> None:
        step = self._pending
        assert step is not None
        self._pending = None
        if isinstance(result, Tensor):
            step.result = self._new_slot(result)
        elif isinstance(result, (list, tuple)):
            for place, value in enumerate(result):
                slot = self._new_slot(value) if isinstance(value, Tensor) else None
                if slot is not None:
                    step.results.append((place, slot))
        made_memory = step.result is not None or step.results
        if made_memory or func._schema.is_mutable or not func._schema.returns:
            self._steps.append(step)
        # Else the result is a view of static memory, as good at replay as it is now.

    def finish(self, result: Any, context: ForwardContext | None) -> Recording:
        buffers: dict[int, Tensor] = {}

        def output(tensor: Tensor) -> Tensor:
            slot = self._slot(tensor)
            if slot is None:
                return tensor
            if slot not in buffers:
                buffers[slot] = _undefined_like(tensor)
            return buffers[slot]

        outputs = map_tensors(result, output)
        self._mark_last_uses(kept=set(buffers))
        pairs = [(buffer, slot) for slot, buffer in buffers.items()]
        return Recording(self._steps, self._num_slots, pairs, outputs, context)

    def undo_writes(self) -> None:
        self._writes.undo()

    def _bind(self, step: _Step, container: Any, places: Any) -> None:
        """Leaves open what earlier steps fill in, and holds static tensors and plain values."""
        for place in places:
            value = container[place]
            if isinstance(value, Tensor):
                slot = self._slot(value)
                if slot is None:
                    _refuse_left_over(value)
                    storage = value.untyped_storage()
                    self._static.setdefault(storage._cdata, storage)
                else:
                    container[place] = None
                    step.patches.append((container, place, slot))
            elif isinstance(value, (list, tuple)):
                container[place] = list(value)
                self._bind(step, container[place], range(len(value)))

    def _slot(self, tensor: Tensor) -> int | None:
        log, slot = getattr(tensor, _SLOT, (None, None))
        return slot if log == self._number else None

    def _new_slot(self, tensor: Tensor) -> int | None:
        """A slot for a step's result, or None for what has one already or needs none."""
        if self._slot(tensor) is not None or self._is_static(tensor):
            return None
        slot = self._num_slots
        self._num_slots += 1
        setattr(tensor, _SLOT, (self._number, slot))
        return slot

    def _is_static(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._static

    def _mark_last_uses(self, kept: set[int]) -> None:
        seen = set(kept)
        for step in reversed(self._steps):
            used = {slot for _, _, slot in step.patches} | {slot for _, slot in step.results}
            if step.result is not None:
                used.add(step.result)
            step.last_uses = sorted(used - seen)
            seen |= used


class _Writes:
    """What a capture overwrote in static tensors, to be put back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._saved_whole: set[tuple[object, ...]] = set()

    def save(self, func: OpOverload, args: tuple, target: Tensor) -> None:
        region = (
            target.untyped_storage()._cdata,
            target.storage_offset(),
            target.dtype,
            tuple(target.shape),
            target.stride(),
        )
        if region in self._saved_whole:
            return
        if func is aten.index_put_.default:
            # A few rows of a large tensor, as when a KV cache is written: save only those.
            indices = [None if index is None else index.clone() for index in args[1]]
            rows = aten.index.Tensor(target, indices)
            self._undo.append(lambda: aten.index_put_.default(target, indices, rows))
        elif func is aten.index_copy_.default:
            dim, index = args[1], args[2].clone()
            rows = target.index_select(dim, index)
            self._undo.append(lambda: target.index_copy_(dim, index, rows))
        else:
            self._saved_whole.add(region)
            values = target.clone()
            self._undo.append(lambda: target.copy_(values))

    def undo(self) -> None:
        with torch.inference_mode():
            while self._undo:
                self._undo.pop()()


def _written(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that ``func`` writes to, by its schema."""
    for place, name in _written_arguments(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (tensor for tensor in value if isinstance(tensor, Tensor))


@cache
def _written_arguments(func: OpOverload) -> list[tuple[int, str]]:
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _undefined_like(tensor: Tensor) -> Tensor:
    """A buffer of the same layout whose content stands out where it is read before a replay."""
    buffer = torch.empty_like(tensor)
    return buffer.fill_(torch.nan if tensor.is_floating_point() else 0)


def _refuse_left_over(tensor: Tensor) -> None:
    """On a GPU such a tensor lies in a graph's pool, and other graphs write there."""
    if hasattr(tensor, _SLOT):
        raise CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} that an earlier capture made is used as if "
            "it were static; keep nothing that is made inside a captured function"
        )


def _under(context: ForwardContext | None) -> AbstractContextManager[None]:
    return nullcontext() if context is None else use_forward_context(context)
