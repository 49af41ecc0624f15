"""The process of every rank but the first: builds its part, then makes the calls it is told of."""

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from specdec.adapter_memory import AdapterMemory
from specdec.build import Parts, build
from specdec.parallel.leading import MEMORY_CALLS, RUNNER_CALLS
from specdec.parallel.ranks import OneRank
from specdec.parallel.spec import HOST, RankSpec, receive, send
from specdec.runner import Runner
from specdec.verifier.lora import LoraSlots
from specdec.verifier.parallel.collectives import join_group
from specdec.verifier.parallel.communicator import Communicator
from specdec.verifier.parallel.sharding import TensorParallel
from specdec.verifier.peft_format import AdapterError

_BEAT_SECONDS = 1.0  # between two signs of life, and looks at whether rank 0 lives
_RECOVERY_SECONDS = 5.0  # in which rank 0 says that a call has failed there too


class FollowerRanks(OneRank):
    """The ranks as one that is told sees them. See ``Ranks``."""

    def __init__(self, spec: RankSpec) -> None:
        self._debug = spec.config.debug
        store = dist.TCPStore(HOST, spec.port, None, False, timeout=timedelta(minutes=5))
        store.set(f"arrived {spec.rank}", "")
        device = spec.config.torch_device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.tp = TensorParallel(spec.rank, spec.size, spec.group)
        self._communicator = Communicator(
            spec.group,
            store,
            spec.rank,
            spec.size,
            device,
            share_memory=spec.config.symmetric_memory,
        )
        join_group(spec.group, self._communicator)
        self.memory: AdapterMemory | None = None

    def largest(self, value: int) -> int:
        return max(self._communicator.all_values(value))

    def make_runner(self, *args: Any, **options: Any) -> Runner:
        compare = self._communicator.check_same if self._debug else None
        return Runner(*args, compare=compare, **options)

    def make_memory(self, slots: LoraSlots, draft_slots: LoraSlots | None) -> AdapterMemory:
        self.memory = AdapterMemory(slots, draft_slots)
        return self.memory


def main(pipe: int, beats: int) -> None:
    """Serve rank 0 until it says so, or is gone. File descriptors: a connection, and a pipe."""
    # An interrupt is for rank 0 to handle: it says what becomes of the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(), beats), daemon=True).start()
    connection = Connection(pipe)
    code = 0
    try:
        spec: RankSpec = receive(connection)
        torch.set_num_threads(spec.num_threads)
        _serve(spec, connection)
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        code = 1
        with contextlib.suppress(OSError):
            send(connection, f"{type(error).__name__}: {error}")
    sys.stderr.flush()
    # Nothing is worth waiting for: not what the other ranks might still be waiting for either.
    os._exit(code)


def _serve(spec: RankSpec, connection: Connection) -> None:
    ranks: list[FollowerRanks] = []

    def join() -> FollowerRanks:
        ranks.append(FollowerRanks(spec))
        return ranks[0]

    parts = build(spec.model, spec.draft, spec.k, spec.config, join)
    send(connection, None)
    calls = _calls(parts, ranks[0])
    refusal: str | None = None
    failure: Exception | None = None
    while True:
        if failure is not None and not connection.poll(_RECOVERY_SECONDS):
            raise failure
        name, args = receive(connection)
        if name == "close":
            return
        if name == "recover":
            send(connection, None)
            failure = None
            continue
        if failure is not None:
            # Rank 0 has gone on without it.
            raise failure
        if name == "reply":
            send(connection, refusal)
            refusal = None
        elif name == "forget_on":
            if args[0] == spec.rank:
                calls["forget"](*args[1:])
        elif name == "add_memory":
            _add_memory(parts, ranks[0], *args)
            calls = _calls(parts, ranks[0])
        else:
            try:
                calls[name](*args)
            except AdapterError as error:
                refusal = str(error)
            except Exception as error:
                failure = error


def _calls(parts: Parts, ranks: FollowerRanks) -> dict[str, Callable[..., Any]]:
    calls = {name: getattr(parts.runner, name) for name in RUNNER_CALLS}
    if ranks.memory is not None:
        calls |= {name: getattr(ranks.memory, name) for name in MEMORY_CALLS}
    return calls


def _add_memory(
    parts: Parts, ranks: FollowerRanks, max_loras: int, max_rank: int, vocabulary: bool
) -> None:
    """The first adapter of an engine that was built without."""
    slots = LoraSlots(
        parts.runner.step.model, max_loras=max_loras, max_rank=max_rank, vocabulary=vocabulary
    )
    ranks.make_memory(slots, None).attach()


def _end_with(parent: int, beats: int) -> None:
    """Give signs of life, and end this process with rank 0, whatever it is waiting for."""
    os.set_blocking(beats, False)
    while os.getppid() == parent:
        with contextlib.suppress(OSError):
            os.write(beats, b".")
        time.sleep(_BEAT_SECONDS)
    os._exit(1)
