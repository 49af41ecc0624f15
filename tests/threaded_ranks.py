"""Ranks as threads of one process: collectives and parts of a model without starting others."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from specdec.verifier.parallel.collectives import join_group, leave_group
from specdec.verifier.parallel.communicator import Communicator
from specdec.verifier.parallel.sharding import TensorParallel

_numbers = itertools.count()


def on_ranks(size: int, run: Callable[[TensorParallel, Communicator], Any]) -> list[Any]:
    """``run`` on every rank, at the same time; what each returned."""
    store, number = dist.HashStore(), next(_numbers)

    @torch.inference_mode()
    def work(rank: int) -> Any:
        # One process has one name for each of its ranks.
        tp = TensorParallel(rank, size, f"test {number} rank {rank}")
        communicator = Communicator(tp.group, store, rank, size, torch.device("cpu"))
        join_group(tp.group, communicator)
        try:
            return run(tp, communicator)
        finally:
            leave_group(tp.group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))
