"""What goes wrong over HTTP, in OpenAI's form."""

import re
from collections.abc import Collection
from typing import Any

from starlette.responses import JSONResponse

from specdec.errors import EngineDeadError, EngineOverloadedError

# The status, in logs and metrics alone, of a request that its client left before its answer.
CLIENT_GONE = 499
MAX_MESSAGE = 1000  # characters of an error's text: it may quote what a client has sent
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_NAME = re.compile(r"[a-z_]+")


class ApiError(Exception):
    """An answer other than 200. ``param`` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


class ModelNotFoundError(LookupError):
    """No model and no adapter has this name."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def model_not_found(name: str) -> ApiError:
    message = f"model: no model and no adapter {name!r} is served here; GET /v1/models lists them"
    return ApiError(404, message, param="model", code="model_not_found")


def ended_in_error(why: str | None) -> ApiError:
    """The answer where a text ended in "error": the format's fault, or ours."""
    if why is not None and why.startswith("response_format"):
        return bad_request(why, "response_format")
    return ApiError(500, f"the text was ended: {why}", code="text_failed")


def as_api_error(error: BaseException, fields: Collection[str] = ()) -> ApiError | None:
    """The answer to an error that the engine raised; None for one that nobody expects.

    ``fields``: names that a message may begin with, to be told as ``param``.
    """
    match error:
        case ApiError():
            return error
        case ModelNotFoundError():
            return model_not_found(str(error))
        case EngineOverloadedError():
            return ApiError(429, str(error), code="overloaded", headers={"Retry-After": "1"})
        case EngineDeadError():
            return ApiError(503, "the engine has failed; see the server's log", code="engine_dead")
        case TimeoutError():
            # OpenAI's client repeats a request that ended in 5xx, unless it is told not to.
            headers = {"x-should-retry": "false"}
            message = "the request took longer than the server's --timeout and was ended"
            return ApiError(503, message, code="timeout", headers=headers)
        case ValueError() | TypeError() | OverflowError() | NotImplementedError() | OSError():
            message = " ".join(str(error).split())
            name = _NAME.match(message)
            param = name[0] if name is not None and name[0] in fields else None
            return bad_request(message, param)
    return None
