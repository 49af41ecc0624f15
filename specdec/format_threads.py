"""Threads that compile formats beside the engine; one that is stuck holds up no other format."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from specdec.errors import EngineOverloadedError

NUM_THREADS = 2
# No thread can be ended from outside: what takes too long goes on while another takes its place.
MAX_STUCK = 4


class FormatThreads:
    """A queue and its threads, which do not keep the process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], bool] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_stuck = 0
        for _ in range(NUM_THREADS):
            self._add_thread()

    def submit(
        self, seconds: float, function: Callable[..., Any], *arguments: Any
    ) -> "Future[Any]":
        """Call ``function``. TimeoutError is the result where that takes longer than ``seconds``.

        Raises EngineOverloadedError while too many that took longer still run.
        """
        if self._num_stuck >= MAX_STUCK:
            raise EngineOverloadedError(
                f"response_format: {self._num_stuck} formats are still being compiled that have "
                "taken too long"
            )
        future: Future[Any] = Future()
        self._queue.put(lambda: self._call(future, seconds, function, arguments))
        return future

    def close(self) -> None:
        """End the threads when they are through with what they do; nobody waits for them."""
        for _ in range(NUM_THREADS):
            self._queue.put(None)

    def _add_thread(self) -> None:
        threading.Thread(target=self._run, name="specdec-format", daemon=True).start()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None and call():
            pass

    def _call(
        self,
        future: "Future[Any]",
        seconds: float,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
    ) -> bool:
        """Whether this thread's place is still its own afterwards."""
        if not future.set_running_or_notify_cancel():
            return True

        def give_up() -> None:
            with self._lock:
                if future.done():
                    return
                self._num_stuck += 1
                future.set_exception(TimeoutError())
            self._add_thread()

        # Not the caller's to watch: it may have left, and the place would be lost.
        watch = threading.Timer(seconds, give_up)
        watch.daemon = True
        watch.start()
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as raised:
            error = raised
        watch.cancel()
        with self._lock:
            if future.done():
                self._num_stuck -= 1
                return False
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True
