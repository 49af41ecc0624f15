"""Memory that the ranks of one host read from each other, for collectives of small messages."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory

from specdec.kernels.rank_sum import sum_ranks
from specdec.kernels.rank_sum_triton import MAX_PROGRAMS, one_shot

# Larger messages go through NCCL, whose copies are better where the link is the limit.
MAX_BYTES = 1 << 20
_SIZES = (1, 8, 1000, 4096, 40_960, 131_072)
_TEST_SECONDS = 60.0  # kernels are compiled in them


class SymmetricMemory:
    """Two halves of a buffer and flags on every rank, at addresses that all of them can read."""

    def __init__(
        self, name: str, store: dist.Store, rank: int, size: int, device: torch.device
    ) -> None:
        """``name``: of the group, in this process alone.

        Raises RuntimeError where the devices cannot reach each other's memory.
        """
        self.rank = rank
        self.size = size
        _SymmetricMemory.set_group_info(name, rank, size, dist.PrefixStore("memory", store))

        def shared(num_bytes: int) -> tuple[Tensor, object, Tensor]:
            memory = _SymmetricMemory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, device, name
            )
            memory.zero_()
            torch.cuda.synchronize(device)
            handle = _SymmetricMemory.rendezvous(memory)
            addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
            return memory, handle, addresses

        self._kept = shared(2 * MAX_BYTES), shared(8 * MAX_PROGRAMS * size)
        (_, _, self._buffers), (_, _, self._flags) = self._kept
        self._epochs = torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device)
        self._lost = torch.zeros(1, dtype=torch.int32, device=device)
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._stream = torch.cuda.Stream(device)

    def holds(self, x: Tensor) -> bool:
        """Whether this, rather than NCCL, is for messages of this size."""
        return x.nbytes <= MAX_BYTES

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._one_shot(x, is_sum=True)

    def all_gather(self, x: Tensor) -> Tensor:
        return self._one_shot(x, is_sum=False)

    def give_up(self) -> None:
        """Let kernels that wait for a rank go on. May be called in any thread."""
        with torch.cuda.stream(self._stream):
            self._lost.copy_(self._one, non_blocking=True)

    def gives_what(self, gather: Callable[[Tensor], Tensor]) -> bool:
        """Whether sums are those of ``gather``, bit for bit. Every rank must ask."""
        # Where a rank's flags are not seen the kernels wait for ever.
        deadline = threading.Timer(_TEST_SECONDS, self.give_up)
        deadline.start()
        good = True
        for dtype in (torch.bfloat16, torch.float32):
            for numel in _SIZES:
                x = torch.arange(numel, device=self._lost.device) % 251 * (0.1 + self.rank)
                x = x.to(dtype)
                theirs = gather(x)
                # Twice: both halves.
                for _ in range(2):
                    good &= torch.equal(self.all_gather(x), theirs)
                    good &= torch.equal(self.all_reduce(x), sum_ranks(theirs))
        deadline.cancel()
        return good

    def _one_shot(self, x: Tensor, *, is_sum: bool) -> Tensor:
        return one_shot(
            x,
            self._buffers,
            self._flags,
            self._epochs,
            self._lost,
            half_bytes=MAX_BYTES,
            rank=self.rank,
            size=self.size,
            is_sum=is_sum,
        )
