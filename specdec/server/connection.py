"""Connections with a limit on what comes before a request is one: its line and its headers."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

# Of a request's line and headers; what h11 takes, where httptools would take any number.
MAX_HEAD_BYTES = 64 << 10
# In which they must have come. Each connection holds a file, of which a process has few.
HEAD_SECONDS = 30.0
# httptools tells what it has made of the bytes. h11 does not, and has a limit of its own.
_TELLS = hasattr(AutoHTTPProtocol, "on_headers_complete")


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP connection, which ends where the head of a request has no end."""

    _num_pending = 0  # bytes since the parser last made something of what came
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_pending += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if _TELLS and self._num_pending > MAX_HEAD_BYTES:
            self._refuse()
        elif self._awaits_request:
            self._watch()
        else:
            self._stop_watching()

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        super().on_message_complete()

    @property
    def _awaits_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _refuse(self) -> None:
        if self._awaits_request:
            self.send_400_response(f"The headers are larger than {MAX_HEAD_BYTES} bytes.")
        else:
            # In the middle of an answer, to a request that came before.
            self.transport.close()

    def _watch(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._end_if_idle)

    def _stop_watching(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_if_idle(self) -> None:
        self._late = None
        if self._awaits_request:
            self.transport.close()
