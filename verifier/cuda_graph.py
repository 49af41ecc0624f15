"""Graphs on a GPU: captures a call as a ``torch.cuda.CUDAGraph``.

All captures of a backend share one memory pool and one stream. What a graph cannot hold is refused
by name before it reaches CUDA (``capture_rules.py``), so that a capture hardly ever breaks; where
one does (a library initialised lazily, no memory), the allocator and the generators are put right.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from specdec.verifier.capture_rules import strict_capture
from specdec.verifier.tensor_tree import map_tensors


class CudaGraphBackend:
    """The ``CaptureBackend`` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._segments: list[range] = []
        # A pool whose graphs are all gone cannot be used again, so one small graph stays in it.
        self._probe = torch.zeros(1, device=self._device)
        self._probe_graph = self._capture_probe()
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(self, fn: Callable[[], Any]) -> "CapturedCudaGraph":
        reserved, used = self._memory()
        graph, outputs = self._capture(fn)
        now_reserved, now_used = self._memory()
        # Pool blocks, and what the driver keeps for the executable graph.
        num_bytes = max(now_reserved - reserved, now_used - used, 0)
        in_pool = self._pool_test()

        def without_ownership(tensor: Tensor) -> Tensor:
            return _alias(tensor, keep_alive=graph) if in_pool(tensor) else tensor

        aliases = map_tensors(outputs, without_ownership)
        return CapturedCudaGraph(graph, aliases, outputs, num_bytes)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)

    def _capture(self, fn: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        graph = torch.cuda.CUDAGraph()
        with self.stream():
            torch.cuda.synchronize(self._device)
            try:
                # Other threads of a server may use CUDA meanwhile, hence thread_local.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                with strict_capture():
                    outputs = fn()
                graph.capture_end()
            except BaseException:
                self._recover(graph)
                raise
        return graph, outputs

    def _pool_test(self) -> Callable[[Tensor], bool]:
        """Tells whether a tensor lies in the pool. Looks at the allocator's segments once at most.

        A look takes milliseconds, and a model in pieces makes hundreds of captures. The pool never
        shrinks, so what is known of it stays true.
        """
        looked = False

        def in_pool(tensor: Tensor) -> bool:
            nonlocal looked
            if tensor.numel() == 0:
                return False
            address = tensor.data_ptr()
            if not any(address in segment for segment in self._segments) and not looked:
                looked = True
                self._segments = [
                    range(segment["address"], segment["address"] + segment["total_size"])
                    for segment in torch.cuda.memory_snapshot()
                    if segment["segment_pool_id"] == self._pool
                ]
            return any(address in segment for segment in self._segments)

        return in_pool

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        """Gives the device back in order after a failed capture, on the capture stream."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture broke, or has ended already. It is over, but the allocators may not have
            # been told: the one for the device is told here, the one for pinned memory cannot be.
            # So that pool takes no further graph, and what the allocator's filter refers to stays.
            with contextlib.suppress(RuntimeError):  # "not currently recording": it was told
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)
            self._broken.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            self._segments = []
        graph.reset()
        # The default generator may believe that it is captured, until the end of a good capture.
        self._probe_graph = self._capture_probe()

    def _capture_probe(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with self.stream(), torch.inference_mode():
            torch.cuda.synchronize(self._device)
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._probe.add_(1)
            graph.capture_end()
        return graph

    def _memory(self) -> tuple[int, int]:
        """Bytes the allocator has reserved, and bytes in use on the device."""
        free, total = torch.cuda.mem_get_info(self._device)
        return torch.cuda.memory_reserved(self._device), total - free


class CapturedCudaGraph:
    """A CUDA graph. Outputs that lie in the pool are aliases without a share in their memory.

    Owning it would take that memory from the pool for each captured shape. An alias does keep the
    graph alive, and with it the pool, so that it never points at memory that was given back.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, outputs: Any, owners: Any, num_bytes: int
    ) -> None:
        self.outputs = outputs
        self.num_bytes = num_bytes
        self._graph = graph
        self._owners = owners

    def replay(self) -> None:
        self._graph.replay()

    def hand_over_outputs(self) -> Any:
        owners, self._owners = self._owners, None
        return owners


class _DeviceMemory:
    """Bytes on a device, described as ``torch.as_tensor`` wants to have them described."""

    def __init__(self, address: int, num_bytes: int, keep_alive: object) -> None:
        self._keep_alive = keep_alive
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def _alias(tensor: Tensor, keep_alive: object) -> Tensor:
    """The same memory, shape, strides and dtype as ``tensor``, which is not empty."""
    span = sum(step * (size - 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    num_bytes = (span + 1) * tensor.element_size()
    memory = _DeviceMemory(tensor.data_ptr(), num_bytes, keep_alive)
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
