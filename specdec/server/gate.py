"""What every request passes first: the API key, and the count of what was answered."""

import base64
import logging
import secrets

from prometheus_client import Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.server.errors import CLIENT_GONE, ApiError

_log = logging.getLogger(__name__)
OPEN_ROUTES = ("/health",)
STATUS_PAGE = "/"


class Gate:
    """Refuses requests without the key, and those that another site's page made a browser send."""

    def __init__(self, app: ASGIApp, *, api_key: str | None, requests: Counter) -> None:
        """``requests``: counts answers, by route and status."""
        self._app = app
        self._api_key = api_key.encode() if api_key is not None else None
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else refusal.response()
            await app(scope, receive, counted)
        except Exception:
            _log.exception("a fault of the server's own")
            if status != CLIENT_GONE:
                raise
            # Raised further it would end the connection, with the client's next request on it.
            await ApiError(500, "internal server error").response()(scope, receive, counted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._requests.labels(route, str(status)).inc()

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if scope["method"] == "POST" and headers.get("sec-fetch-site") == "cross-site":
            return ApiError(403, "requests from the pages of other sites are refused")
        if self._api_key is None or scope["path"] in OPEN_ROUTES:
            return None
        given = given_key(headers.get("authorization", ""))
        if secrets.compare_digest(given, self._api_key):
            return None
        # A browser asks its user for the key, as the password of any name.
        scheme = 'Basic realm="specdec"' if scope["path"] == STATUS_PAGE else "Bearer"
        message = "the API key is missing or wrong: send Authorization: Bearer KEY"
        return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": scheme})


def given_key(header: str) -> bytes:
    """The key in an Authorization header: "Bearer KEY", or "Basic" with the key as password."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode("latin-1")
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).partition(b":")[2]
        except ValueError:
            return b""
    return b""
