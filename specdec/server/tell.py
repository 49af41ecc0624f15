"""Errors as answers in OpenAI's form, whichever application raised them."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from specdec.server.errors import ApiError


def tell_errors(app: FastAPI) -> None:
    """Every answer but 200 has OpenAI's form."""
    for kind in (ApiError, HTTPException):
        app.add_exception_handler(kind, _tell)


async def _tell(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        headers = dict(error.headers) if error.headers else None
        error = ApiError(error.status_code, message, headers=headers)
    assert isinstance(error, ApiError)
    return error.response()
