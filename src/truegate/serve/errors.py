"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Invariant: whatever goes wrong in a request, the body has this shape and the message names the field and the remedy.
"""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from truegate.errors import UserError
from truegate.serve.client import EngineDied

log = logging.getLogger("truegate.serve")

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNIONS = {
    "prompt": "must be a text, a list of texts, a list of token ids, or a list of such lists; none of them empty",
    "content": "must be a text, or a list of parts of the form {type: text, text: ...}: other kinds are not supported",
    "stop": "must be a text or a list of texts",
    "return_routed_experts": 'must be true, false, "list" or "base64"',
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer that is not 2xx."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that ends here, with its status and OpenAI's error fields."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
        return JSONResponse(self.body(), status_code=self.status, headers=headers.get(self.status))


def engine_died(error: EngineDied) -> ApiError:
    return ApiError(503, str(error), code="engine_unavailable")


def from_validation(errors: Sequence[Any]) -> ApiError:
    """One clear line from pydantic's list: unsupported fields first, then the first thing that is wrong."""
    unknown = [_path(error) for error in errors if error["type"] == "extra_forbidden" and _union_of(error) is None]
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        verb = "is" if len(unknown) == 1 else "are"
        message = f"{names} {verb} not supported by this server; leave it out (an unknown field is never ignored)"
        return ApiError(400, message, param=unknown[0], code="unsupported_field")
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    union = _union_of(first)
    if union is not None:
        return ApiError(400, f"`{union}` {_UNIONS[union.rpartition('.')[2]]}", param=union)
    path = _path(first)
    message = first["msg"].removeprefix("Value error, ")
    if not path:
        wanted = "a JSON object, sent as content-type application/json" if first["type"] != "value_error" else ""
        return ApiError(400, f"the body must be {wanted}" if wanted else message)
    return ApiError(400, f"`{path}`: {message[:1].lower()}{message[1:]}", param=path)


def _path(error: Any) -> str:
    """`response_format.type` from ("body", "response_format", "type")."""
    return ".".join(str(part) for part in error["loc"] if part not in ("body", "query", "path"))


def _union_of(error: Any) -> str | None:
    """The path of the field with several forms that the error is inside of, if any."""
    parts = [part for part in error["loc"] if part != "body"]
    for end, part in enumerate(parts):
        if part in _UNIONS and (end == 0 or parts[0] == "messages") and end + 1 < len(parts):
            return ".".join(str(piece) for piece in parts[: end + 1])
    return None


def install_handlers(app: FastAPI) -> None:
    """Give every kind of failure the one shape."""

    @app.exception_handler(ApiError)
    async def _api(request: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(UserError)
    async def _user(request: Request, error: UserError) -> JSONResponse:
        return ApiError(400, str(error)).response()

    @app.exception_handler(EngineDied)
    async def _died(request: Request, error: EngineDied) -> JSONResponse:
        return engine_died(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return from_validation(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = {
            400: "the body cannot be read: it must be JSON in UTF-8, uncompressed, without absurd depth or numbers",
            404: f"there is no {request.url.path} here: see /docs",
            405: f"{request.method} is not allowed on {request.url.path}",
        }.get(error.status_code, str(error.detail))
        answer = ApiError(error.status_code, message).response()
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    async def _defect(request: Request, error: Exception) -> JSONResponse:
        log.exception("a defect while answering %s %s", request.method, request.url.path, exc_info=error)
        return ApiError(500, f"a defect of the server: {type(error).__name__}", code="internal_error").response()
