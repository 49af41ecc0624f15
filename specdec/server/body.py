"""A request's JSON body: read within limits, and taken apart field by field."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

from specdec.server.errors import ApiError, bad_request

# A client that sends too much reads the answer only once it has sent all, so what it sends is
# thrown away up to here before it is told.
_DISCARDED = 64 << 20
_REQUIRED: Any = object()


async def read_object(request: Request, *, max_bytes: int, timeout: float) -> dict[str, Any]:
    """The JSON object in a request's body. Raises ApiError with 400, 408 or 413."""
    return parse_object(await read_body(request, max_bytes=max_bytes, timeout=timeout))


async def read_body(request: Request, *, max_bytes: int, timeout: float) -> bytes:
    """A request's body. Raises ApiError with 400, 408 or 413."""
    try:
        async with asyncio.timeout(timeout):
            return await _read(request, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"the body had not come after {timeout:g} s") from error
    except ClientDisconnect as error:
        raise bad_request("the client left in the middle of the body") from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """Raises ApiError (400) for anything but one JSON object of valid Unicode."""
    try:
        # json.loads takes bytes that no decoder should: halves of surrogate pairs.
        text = raw.decode(json.detect_encoding(raw))
        value = json.loads(text)
        if "\\u" in text:
            # Written as an escape, such a half is valid JSON and still no text.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= max_bytes:
            parts.append(part)
        elif size > _DISCARDED:
            break
        else:
            parts.clear()
    if size > max_bytes:
        raise ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    return b"".join(parts)


class Fields:
    """The fields of a JSON object, each to be taken once; ``finish`` refuses what is left.

    A field that is null counts as absent.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, name: str, default: Any = None) -> Any:
        value = self._left.pop(name, None)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise bad_request(f"{name} must be true or false, got {value!r}", name)
        return value

    def string(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.take(name, default)
        if value is _REQUIRED:
            raise bad_request(f"{name} is required", name)
        if value is not None and not isinstance(value, str):
            raise bad_request(f"{name} must be a string, got {value!r}", name)
        return value

    def finish(self, unsupported: Mapping[str, str] | None = None) -> None:
        """Raise ApiError naming the fields that nobody took.

        ``unsupported``: fields of the interface that this server does not have, and why.
        """
        for name, why in (unsupported or {}).items():
            if self.take(name) is not None:
                raise bad_request(f"{name} is not supported{why}", name)
        if self._left:
            names = sorted(self._left)
            raise bad_request(f"unknown field: {', '.join(names)}", names[0])
