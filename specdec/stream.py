"""The events of a request, for callers without a loop of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from specdec.outputs import StreamEvent
from specdec.request import Request

if TYPE_CHECKING:
    from specdec.engine import Engine


class Stream:
    """The events of one request, stepping the engine as they are asked for.

    Closing it, or letting go of it, aborts what still runs, also before the first event.
    """

    def __init__(self, engine: Engine, group: list[Request]) -> None:
        self._engine = engine
        self._group = group

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamEvent:
        while True:
            for request in self._group:
                if request.events:
                    return request.events.popleft()
            if all(request.finish_reason is not None for request in self._group):
                raise StopIteration
            try:
                self._engine.step()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._engine.abort_all(self._group)
        for request in self._group:
            request.events.clear()

    def __del__(self) -> None:
        self.close()
