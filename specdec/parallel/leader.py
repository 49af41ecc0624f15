"""Rank 0's end: starts the other ranks, tells them what to do, and notices when one is gone."""

import contextlib
import json
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from specdec.adapter_memory import AdapterMemory
from specdec.parallel.leading import LeadingMemory, LeadingRunner
from specdec.parallel.ranks import RankLostError
from specdec.parallel.spec import HOST, RankSpec, receive, send
from specdec.runner import Runner
from specdec.verifier.lora import LoraSlots
from specdec.verifier.parallel.collectives import join_group, leave_group
from specdec.verifier.parallel.communicator import Communicator
from specdec.verifier.parallel.sharding import TensorParallel

logger = logging.getLogger(__name__)

# From a collective that fails to the news that a rank has ended: both follow at once.
_NEWS_SECONDS = 5.0
# A rank that serves and gives no sign of life for so long is ended.
SILENT_SECONDS = 20
# A rank that was told to end may take this long.
_END_SECONDS = 10.0
# A call that failed on rank 0 may take this long to fail on another rank, or to succeed there.
_RECOVERY_SECONDS = 10.0
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specdec.parallel.follower import main; main(*map(int, sys.argv[2:]))"
)


class _Follower:
    """Another rank's process, as rank 0 sees it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.is_silent = False
        self.connection, theirs = Pipe()
        # It writes a byte there every second.
        self.beats, beat = os.pipe()
        fds = (theirs.fileno(), beat)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, json.dumps(sys.path), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        theirs.close()
        os.close(beat)
        threading.Thread(target=self._relay, daemon=True).start()

    def _relay(self) -> None:
        """In a thread of its own: what the process says, with its name before it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with contextlib.suppress(ValueError, OSError):
                sys.stderr.write(f"rank {self.rank}: {line}")


class LeaderRanks:
    """The ranks of an engine in the user's process. See ``Ranks``."""

    def __init__(self, spec: RankSpec) -> None:
        """``spec``: of rank 0, without the port. Starts the other ranks and meets them."""
        # A failed start leaves these for ``close``.
        self._followers: list[_Follower] = []
        self._lost: str | None = None
        self._is_closing = False
        self._has_begun = False
        self._communicator: Communicator | None = None
        self._news = threading.Event()
        store = dist.TCPStore(
            HOST, 0, None, True, timeout=timedelta(minutes=5), wait_for_workers=False
        )
        self._spec = spec = replace(spec, port=store.port)
        self.tp = TensorParallel(0, spec.size, spec.group)
        try:
            for rank in range(1, spec.size):
                follower = _Follower(rank)
                self._followers.append(follower)
                for watch in (self._watch, self._listen):
                    threading.Thread(target=watch, args=(follower,), daemon=True).start()
                config = replace(spec.config, device=device_of(spec.config, rank))
                send(follower.connection, replace(spec, rank=rank, config=config))
            device = torch.device(device_of(spec.config, 0))
            # A rank that cannot start ends; nobody else comes to the store in its place.
            self._wait_for(self._met(store))
            self._communicator = Communicator(
                spec.group,
                store,
                0,
                spec.size,
                device,
                self.explain,
                share_memory=spec.config.symmetric_memory,
            )
            join_group(spec.group, self._communicator)
        except BaseException as error:
            explained = self.explain(error)
            self.close()
            if explained is error:
                raise
            raise explained from error

    def _met(self, store: dist.Store) -> "_Arrivals":
        return _Arrivals(store, self._spec.size)

    def _wait_for(self, arrivals: "_Arrivals") -> None:
        while not arrivals.are_complete():
            self.check()
            time.sleep(0.02)

    # -- what the engine's parts see --------------------------------------------------------------

    def largest(self, value: int) -> int:
        assert self._communicator is not None
        return max(self._communicator.all_values(value))

    def make_runner(self, *args: Any, **options: Any) -> Runner:
        compare = None
        if self._spec.config.debug:
            assert self._communicator is not None
            compare = self._communicator.check_same
        return LeadingRunner(self, *args, watch=self.check, compare=compare, **options)

    def make_memory(self, slots: LoraSlots, draft_slots: LoraSlots | None) -> AdapterMemory:
        return LeadingMemory(self, slots, draft_slots)

    def add_memory(self, slots: LoraSlots) -> AdapterMemory:
        self.tell("add_memory", slots.max_loras, slots.max_rank, slots.vocabulary)
        return LeadingMemory(self, slots, None)

    def begin(self) -> None:
        for follower in self._followers:
            self._reply(follower)
        self._has_begun = True

    def tell(self, name: str, *args: Any) -> None:
        """Have the other ranks make a call too. They do so in their own time.

        While all ranks build their parts they need not be told. Raises RankLostError.
        """
        if not self._has_begun:
            return
        self.check()
        for follower in self._followers:
            self._send(follower, (name, args))

    def ask(self, name: str, *args: Any) -> list[str | None]:
        """The same, and wait: for each of the other ranks None, or why it could not."""
        if not self._has_begun:
            return []
        self.tell(name, *args)
        self.tell("reply")
        return [self._reply(follower) for follower in self._followers]

    def check(self) -> None:
        if self._lost is not None:
            raise RankLostError(self._lost)

    def recover(self, error: BaseException) -> None:
        self.check()
        deadline = time.monotonic() + _RECOVERY_SECONDS
        self.tell("recover")
        for follower in self._followers:
            self._reply(follower, deadline)

    def explain(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception) or isinstance(error, RankLostError):
            return error
        # Where one has ended, the news is on its way.
        self._news.wait(_NEWS_SECONDS if isinstance(error, RuntimeError) else 0.0)
        return error if self._lost is None else RankLostError(self._lost)

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        for follower in self._followers:
            with contextlib.suppress(OSError):
                send(follower.connection, ("close", ()))
        deadline = time.monotonic() + (0.0 if self._lost is not None else _END_SECONDS)
        for follower in self._followers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                follower.process.wait(max(0.0, deadline - time.monotonic()))
            if follower.process.poll() is None:
                follower.process.kill()
                follower.process.wait()
            follower.connection.close()
        leave_group(self._spec.group)

    # -- the other ranks --------------------------------------------------------------------------

    def _send(self, follower: _Follower, message: Any) -> None:
        try:
            send(follower.connection, message)
        except OSError as error:
            raise self.explain(RuntimeError(f"rank {follower.rank}: {error}")) from error

    def _reply(self, follower: _Follower, deadline: float = math.inf) -> str | None:
        """What a rank answers; RankLostError where it is gone, or has not answered in time."""
        try:
            while not follower.connection.poll(0.05):
                self.check()
                if time.monotonic() > deadline:
                    follower.process.kill()
                    deadline = math.inf
            answer: str | None = receive(follower.connection)
        except (EOFError, OSError) as error:
            raise self.explain(RuntimeError(f"rank {follower.rank} does not answer")) from error
        return answer

    def _listen(self, follower: _Follower) -> None:
        """In a thread of its own: end a rank that no longer goes on, though it has not ended."""
        silent = 0
        while silent < SILENT_SECONDS:
            if select.select([follower.beats], [], [], 1.0)[0]:
                if not os.read(follower.beats, 1 << 16):
                    os.close(follower.beats)
                    return
                silent = 0
            elif self._has_begun:
                # Counted, not measured: where all processes were stopped no time has passed.
                silent += 1
        follower.is_silent = True
        follower.process.kill()

    def _watch(self, follower: _Follower) -> None:
        """In a thread of its own: wait for the end of a rank."""
        code = follower.process.wait()
        if self._is_closing or self._lost is not None:
            return
        how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        reason = _last_words(follower.connection)
        if follower.is_silent:
            reason = f"it had given no sign of life for {SILENT_SECONDS} seconds"
        self._lost = (
            f"rank {follower.rank} of {self._spec.size} was lost: its process (pid "
            f"{follower.process.pid}) was {how}" + (f": {reason}" if reason else "")
        ).replace("was ended", "ended")
        self._news.set()
        if self._communicator is not None:
            self._communicator.abort()


class _Arrivals:
    """Which ranks have come to the store."""

    def __init__(self, store: dist.Store, size: int) -> None:
        self._store = store
        self._keys = [f"arrived {rank}" for rank in range(1, size)]

    def are_complete(self) -> bool:
        return bool(self._store.check(self._keys))


def _last_words(connection: Connection) -> str:
    """What a rank that failed has said about it."""
    with contextlib.suppress(EOFError, OSError):
        while connection.poll(0):
            words = receive(connection)
            if words is not None:
                return str(words)
    return ""


def device_of(config: Any, rank: int) -> str:
    """The device of a rank: GPU ``rank``, or the CPU for all."""
    return f"cuda:{rank}" if config.torch_device.type == "cuda" else "cpu"
