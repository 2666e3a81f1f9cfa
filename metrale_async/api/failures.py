"""How a failure looks to a client: one JSON shape, OpenAI's, for every status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from metrale_async.errors import AuthenticationError, EngineError, EngineUnavailableError, QueueFullError, RequestError

UNAVAILABLE_RETRY_AFTER_S: Final = 5
INTERNAL_ERROR_MESSAGE: Final = "internal error; the server's log has the details under this request id"

_CODES: Final[Mapping[int, str]] = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "payload_too_large",
    417: "expectation_failed",
}


def error_object(error: RequestError | EngineError) -> dict[str, Any]:
    """The ``{"error": ...}`` object; also the data of an error event."""
    return _object(error.message, error.error_type, getattr(error, "param", None), error.code)


def error_response(error: RequestError | EngineError) -> web.Response:
    headers = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(error.retry_after_s)
    elif isinstance(error, EngineUnavailableError):
        headers["Retry-After"] = str(UNAVAILABLE_RETRY_AFTER_S)
    elif isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_object(error), status=error.status, headers=headers)


def http_exception_response(error: web.HTTPException) -> web.Response:
    """What aiohttp itself refuses: no such route, wrong method ..."""
    allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    code = _CODES.get(error.status, "bad_request" if error.status < 500 else "internal_error")
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return json_response(_object(error.reason, kind, None, code), status=error.status, headers=allow)


def unexpected_error_object() -> dict[str, Any]:
    """A defect of the server; what it was goes to the log and not to the client."""
    return _object(INTERNAL_ERROR_MESSAGE, "server_error", None, "internal_error")


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """``value`` may be JSON already, as bytes."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    # Messages quote what was sent, and a name may hold what UTF-8 cannot.
    text = message.encode("utf-8", "replace").decode()
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}
