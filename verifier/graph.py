"""Captures a function once per shape and replays it afterwards.

Start here: ``CUDAGraphWrapper`` is called in place of the function and obeys the forward context,
which holds what ``dispatcher.py`` decided. How a call is captured is behind ``capture.py``: on a
GPU by ``cuda_graph.py``, elsewhere by ``recorder.py``.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.verifier.capture import CaptureBackend, Captured, CaptureError
from specdec.verifier.context import ForwardContext, get_forward_context, use_forward_context
from specdec.verifier.modes import ROLES, BatchDescriptor, CUDAGraphMode, GraphKey
from specdec.verifier.tensor_tree import leaves, tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRow:
    """One captured graph, as ``engine.graph_table()`` shows it."""

    role: str
    mode: str
    descriptor: BatchDescriptor
    variant: str
    num_bytes: int
    capture_seconds: float
    replays: int
    max_error: float | None = None  # of the first replay against eager; None if not verified
    rounds: int = 1


class GraphPool:
    """One memory pool and one capture stream, shared by all wrappers of an engine.

    Graphs are captured only inside ``capture_window()``: a batch of a new shape is an error of the
    dispatcher's, not a reason to capture in the middle of traffic.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        """device: where the wrapped functions run; None for CUDA where there is one."""
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.backend = _make_backend(self.device)
        self.window_is_open = False
        self.is_capturing = False

    @contextmanager
    def capture_window(self) -> Iterator[None]:
        """Wrappers capture what they see for the first time while this holds; it nests.

        Garbage collection rests meanwhile: in the middle of a capture it could free a CUDA graph or
        a tensor there, which a capture cannot hold.
        """
        if self.window_is_open:
            yield
            return
        self.window_is_open = True
        gc_was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if gc_was_enabled:
                gc.enable()
            self.window_is_open = False

    def stream(self) -> AbstractContextManager[object]:
        """The capture stream, for warm-up: what is set up per stream is then there at capture."""
        return self.backend.stream()

    def capture(self, fn: Callable[[], Any]) -> Captured:
        self.is_capturing = True
        try:
            return self.backend.capture(fn)
        finally:
            self.is_capturing = False


class CUDAGraphWrapper:
    """Stands in for ``runnable``; replays its graph where the forward context says so.

    It trusts the forward context. In its own ``mode`` it replays the graph of the context's key; in
    any other mode, or inside another capture of the pool, it calls straight through, so that a
    FULL wrapper outside and PIECEWISE wrappers inside never fire together.

    Tensors among the arguments, nested ones too, are static: a replay reads them at the addresses
    of the capture, whatever it is called with. All other values are frozen at capture. The result
    of a replay is the same tensors each time, overwritten by the next replay in the pool.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        mode: CUDAGraphMode,
        *,
        role: str = "step",
        pool: GraphPool | None = None,
        debug: bool = False,
        verify_state: Sequence[Tensor] | None = None,
    ) -> None:
        """
        mode: FULL or PIECEWISE.
        role: the key table that the graphs belong to, one of ``modes.ROLES``.
        pool: shared with the other wrappers of the engine; its own if None.
        debug: check at each replay that the arguments are those of the capture: tensors by address
            and layout, plain values by equality.
        verify_state: compare the first replay of each graph with an eager run. These are the
            tensors that ``runnable`` both reads and writes; they are compared too, and put back
            between the two runs. Pass an empty list for a function without state.
        """
        if mode not in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            raise ValueError(f"mode must be FULL or PIECEWISE, not {mode}")
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        self.runnable = runnable
        self.mode = mode
        self.role = role
        self.pool = pool if pool is not None else GraphPool()
        self.debug = debug
        self.verify_state = verify_state
        self._graphs: dict[GraphKey, _Graph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs, captures or replays ``runnable(*args, **kwargs)``.

        The call that captures runs nothing: it returns the graph's outputs with undefined values.
        Raises ``CaptureError`` where the capture fails, naming the key and the cause, and
        ``RuntimeError`` for a key without a graph outside a capture window.
        """
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self.mode or self.pool.is_capturing:
            return self.runnable(*args, **kwargs)

        key = self._key(context)
        graph = self._graphs.get(key)
        if graph is None:
            return self._capture(key, args, kwargs)
        if self.debug:
            graph.check_arguments(key, args, kwargs)
        if self.verify_state is not None and graph.max_error is None:
            graph.max_error = self._verified_replay(graph, context, args, kwargs)
        else:
            graph.captured.replay()
        graph.replays += 1
        return graph.captured.outputs

    def capture_window(self) -> AbstractContextManager[None]:
        return self.pool.capture_window()

    def table(self) -> list[GraphRow]:
        """One row per captured graph, in the order of capture."""
        return [
            GraphRow(
                role=key.role,
                mode=self.mode.name,
                descriptor=key.descriptor,
                variant=key.variant,
                num_bytes=graph.captured.num_bytes,
                capture_seconds=graph.capture_seconds,
                replays=graph.replays,
                max_error=graph.max_error,
                rounds=key.rounds,
            )
            for key, graph in self._graphs.items()
        ]

    def has_graph(self, key: GraphKey) -> bool:
        return key in self._graphs

    def forget_replays(self) -> None:
        """Count replays from here on."""
        for graph in self._graphs.values():
            graph.replays = 0

    def clear(self) -> None:
        """Drops all graphs; outputs that someone still holds keep theirs alive."""
        self._graphs.clear()

    def _key(self, context: ForwardContext) -> GraphKey:
        descriptor = context.batch_descriptor
        assert descriptor is not None  # a mode other than NONE has one, see ForwardContext
        if self.mode is CUDAGraphMode.PIECEWISE:
            descriptor = descriptor.relaxed()
        return GraphKey(self.role, descriptor, context.variant, context.rounds)

    def _capture(self, key: GraphKey, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.pool.window_is_open:
            raise RuntimeError(
                f"no {self.mode} graph for {key}: it is not captured, and no capture window is open"
            )
        start = time.perf_counter()
        try:
            captured = self.pool.capture(lambda: self.runnable(*args, **kwargs))
        except Exception as error:
            raise CaptureError(f"capture of the {self.mode} graph {key} failed: {error}") from error
        self._graphs[key] = _Graph(captured, time.perf_counter() - start, args, kwargs)
        return captured.hand_over_outputs()

    def _verified_replay(
        self, graph: "_Graph", context: ForwardContext, args: tuple, kwargs: dict[str, Any]
    ) -> float:
        """Replays once, and returns the largest error against an eager run from the same state."""
        assert self.verify_state is not None
        with torch.inference_mode():
            before = [tensor.clone() for tensor in self.verify_state]
            eager_context = dataclasses.replace(context, cudagraph_runtime_mode=CUDAGraphMode.NONE)
            with use_forward_context(eager_context):
                result = self.runnable(*args, **kwargs)
            expected = [tensor.clone() for tensor in (*tensors(result), *self.verify_state)]
            for tensor, value in zip(self.verify_state, before, strict=True):
                tensor.copy_(value)

            graph.captured.replay()
            replayed = [*tensors(graph.captured.outputs), *self.verify_state]
            errors = [_max_error(a, b) for a, b in zip(expected, replayed, strict=True)]
        return max(errors, default=0.0)


class _Graph:
    """A captured graph with its record, and what it was captured with."""

    def __init__(
        self, captured: Captured, capture_seconds: float, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self.captured = captured
        self.capture_seconds = capture_seconds
        self.replays = 0
        self.max_error: float | None = None
        self._arguments = _fingerprint(args, kwargs)

    def check_arguments(self, key: GraphKey, args: tuple, kwargs: dict[str, Any]) -> None:
        given = _fingerprint(args, kwargs)
        for name in self._arguments.keys() | given.keys():
            at_capture, now = self._arguments.get(name), given.get(name)
            if at_capture != now:
                raise RuntimeError(
                    f"{name} of the graph {key} is not what it was captured with: "
                    f"{at_capture} then, {now} now"
                )


def capture_all(
    pool: GraphPool,
    keys: Iterable[tuple[CUDAGraphMode, BatchDescriptor]],
    run: Callable[[CUDAGraphMode, BatchDescriptor], object],
    *,
    on_error: Callable[[CUDAGraphMode, BatchDescriptor, CaptureError], None] | None = None,
) -> None:
    """Captures every key of a dispatcher's ``capture_list()``, in its order.

    ``run(mode, descriptor)`` runs a dummy batch of that shape under a forward context of that mode.
    It is called twice for a key, first with NONE, so that whatever is set up on first use
    (compiled kernels, tuned tiles, workspaces) is there before the capture. A capture that fails
    goes to ``on_error``, or is raised where there is none.
    """
    with pool.capture_window():
        for mode, descriptor in keys:
            with pool.stream():
                run(CUDAGraphMode.NONE, descriptor)
            try:
                run(mode, descriptor)
            except CaptureError as error:
                if on_error is None:
                    raise
                on_error(mode, descriptor, error)


def _make_backend(device: torch.device) -> CaptureBackend:
    if device.type == "cuda":
        from specdec.verifier.cuda_graph import CudaGraphBackend

        return CudaGraphBackend(device)
    from specdec.verifier.recorder import RecorderBackend

    return RecorderBackend()


def _fingerprint(args: tuple, kwargs: dict[str, Any]) -> dict[str, object]:
    """What a replay takes for granted about each argument, by the argument's name."""
    named = {**{f"argument {i}": arg for i, arg in enumerate(args)}, **kwargs}
    prints: dict[str, object] = {}
    for root, tree in named.items():
        for name, leaf in leaves(tree, root):
            if isinstance(leaf, Tensor):
                layout = (tuple(leaf.shape), leaf.stride(), str(leaf.dtype))
                prints[name] = (f"address {leaf.data_ptr():#x}", *layout)
            elif isinstance(leaf, (bool, int, float, str, type(None))):
                prints[name] = leaf
    return prints


def _max_error(expected: Tensor, got: Tensor) -> float:
    """Largest absolute difference; 0 where both are NaN or the same infinity, else infinite."""
    if expected.shape != got.shape:
        return float("inf")
    wide, other = expected.double(), got.double()
    same = (wide == other) | (wide.isnan() & other.isnan())
    error = torch.where(same, 0.0, (wide - other).abs()).nan_to_num(nan=float("inf"))
    return error.max().item() if error.numel() else 0.0
