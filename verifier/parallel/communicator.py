"""How the ranks of one model reach each other: gloo between hosts and CPUs, NCCL between GPUs.

Shape letters: N ranks.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.kernels.rank_sum import sum_ranks

if TYPE_CHECKING:
    from specdec.verifier.parallel.symmetric import SymmetricMemory

logger = logging.getLogger(__name__)

# A rank may take this long to load its part while the others wait for it. One that is gone is
# noticed at once: its connections close.
TIMEOUT = timedelta(minutes=30)
# Larger sums of more than two ranks are made in parts, one by each rank: less is sent.
_WHOLE_SUM_BYTES = 1 << 18


class RanksDisagreeError(RuntimeError):
    """Two ranks of one engine have done different things in the same step."""


class Communicator:
    """The collectives of one rank. Every rank must call them in the same order.

    ``lost_rank``: makes an error that says which rank is gone of the one that a collective raised.
    """

    def __init__(
        self,
        name: str,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        lost_rank: Callable[[BaseException], BaseException] = lambda error: error,
        *,
        share_memory: bool = True,
    ) -> None:
        """``share_memory``: between GPUs small messages may go through memory that all can read."""
        self.name = name
        self.rank = rank
        self.size = size
        self.device = device
        self._lost_rank = lost_rank
        self._hosts: Any = _gloo(dist.PrefixStore("hosts", store), rank, size)
        self._data = self._hosts
        self.symmetric: SymmetricMemory | None = None
        if device.type == "cuda":
            self._data = _nccl(dist.PrefixStore("data", store), rank, size)
            # Connects, which a capture could not.
            self._gather(torch.zeros(size, device=device))
            torch.cuda.synchronize(device)
            if share_memory:
                self._share_memory(store)

    # -- in the model -----------------------------------------------------------------------------

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, added in their order whatever the size: see ``sum_ranks``."""
        x = x.contiguous()
        if self.symmetric is not None and self.symmetric.holds(x):
            return self.symmetric.all_reduce(x)
        if self.size == 2 or x.nbytes <= _WHOLE_SUM_BYTES:
            return sum_ranks(self._gather(x))
        return self._sum_in_parts(x)

    def all_gather(self, x: Tensor) -> Tensor:
        """[N, ...] in the order of the ranks."""
        x = x.contiguous()
        if self.symmetric is not None and self.symmetric.holds(x):
            return self.symmetric.all_gather(x)
        return self._gather(x)

    def _sum_in_parts(self, x: Tensor) -> Tensor:
        """The same bits: each rank adds its part of all elements, then they are put together."""
        length = -(-x.numel() // self.size)
        parts = torch.nn.functional.pad(x.flatten(), (0, self.size * length - x.numel()))
        theirs = torch.empty_like(parts)
        with self._errors():
            self._data.alltoall_base(theirs, parts, [], []).wait()
        whole = self._gather(sum_ranks(theirs.view(self.size, length)))
        return whole.flatten()[: x.numel()].view(x.shape)

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size, *x.shape))
        options = dist.distributed_c10d.AllgatherOptions()
        # On the stream that the model runs on, where the backend can.
        options.asyncOp = self._data is self._hosts
        with self._errors():
            work = self._data._allgather_base(out.view(-1), x.view(-1), options)
            if work is not None:
                work.wait()
        return out

    # -- between the hosts ------------------------------------------------------------------------

    def all_values(self, value: int) -> list[int]:
        """Every rank's ``value``, known to all hosts. No device waits."""
        out = torch.empty(self.size, dtype=torch.int64)
        with self._errors():
            self._hosts._allgather_base(out, torch.tensor([value], dtype=torch.int64)).wait()
        return out.tolist()

    def check_same(self, value: int, what: str) -> None:
        """Raise RanksDisagreeError on every rank unless all have the same ``value``."""
        values = self.all_values(value)
        others = [rank for rank, each in enumerate(values) if each != values[0]]
        if others:
            raise RanksDisagreeError(f"rank 0 and rank {others[0]} differ in {what}")

    # -- the end ----------------------------------------------------------------------------------

    def abort(self) -> None:
        """Let go of what waits for a rank that is gone. May be called in any thread."""
        if self.symmetric is not None:
            self.symmetric.give_up()
        if self._data is not self._hosts:
            # Some versions wait for the kernels that they end.
            threading.Thread(target=_abort, args=(self._data,), daemon=True).start()

    def close(self) -> None:
        """Close the connections. Nothing may be waiting for them."""
        self.symmetric = None
        if self._data is not self._hosts:
            _abort(self._data)
        self._data = self._hosts = None

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            explained = self._lost_rank(error)
            if explained is error:
                raise
            raise explained from error

    def _share_memory(self, store: dist.Store) -> None:
        """Take the collectives of one kernel where all ranks can, and give what NCCL gives."""
        symmetric, reason = None, ""
        try:
            from specdec.verifier.parallel.symmetric import SymmetricMemory

            symmetric = SymmetricMemory(self.name, store, self.rank, self.size, self.device)
        except Exception as error:
            reason = str(error)
        if not all(self.all_values(symmetric is not None)):
            logger.warning("sums over ranks go through NCCL alone: %s", reason or "a rank must")
            return
        assert symmetric is not None
        good = symmetric.gives_what(self._gather)
        if all(self.all_values(good)):
            self.symmetric = symmetric
        else:
            logger.warning("sums over ranks go through NCCL alone: shared memory gave others")


def _gloo(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    with _environment(
        # A lost rank must not end the user's process, as PyTorch's watchdog would.
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
    ):
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """These variables while something reads them."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _abort(group: Any) -> None:
    try:
        (group.abort if hasattr(group, "abort") else group._abort)()
    except RuntimeError as error:
        logger.debug("NCCL: %s", error)
