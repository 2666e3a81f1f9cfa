"""Request bodies: read within bounds, and parsed strictly.

The shape of the text is checked before a parser sees it, with a few passes at memory speed: nesting, number of items
and repeated names cost linear time and no recursion whatever the client sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final, TypeVar

import anyio.to_thread
import orjson
from aiohttp import web

from metrale_async.api.limits import BODY_TIMEOUT_S, MAX_JSON_DEPTH, MAX_JSON_VALUES
from metrale_async.errors import InvalidRequestError, PayloadTooLargeError, RequestError

MAX_INLINE_BYTES: Final = 16 * 1024
"""Longer bodies are parsed and checked on a worker thread: this many bytes of small values take some 3 ms."""

Made = TypeVar("Made")

_BRACKETS: Final = b"[]{}"
_NOT_BRACKETS: Final = bytes(sorted(set(range(256)) - set(_BRACKETS)))
_STEP: Final = tuple(1 if byte in b"[{" else -1 for byte in range(256))


class UnsupportedMediaTypeError(RequestError):
    """The body is not plain JSON in UTF-8."""

    status = 415
    code = "unsupported_media_type"


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408
    code = "request_timeout"


async def read_json(request: web.Request, make: Callable[[dict[str, Any]], Made]) -> Made:
    """What ``make`` makes of the body, a JSON object; it may run on a worker thread. Raises RequestError: 400, 408, 413
    or 415, and what ``make`` raises."""
    body = await _read(request)

    def work() -> Made:
        return make(parse_json_object(body))

    if len(body) <= MAX_INLINE_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


def parse_json_object(body: bytes) -> dict[str, Any]:
    """A JSON object in which every name occurs once. Raises InvalidRequestError."""
    names = _check_shape(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequestError("the body must be a JSON object", code="invalid_json")
    if _count_names(value, enough=names) != names:
        raise InvalidRequestError("the body names a field of an object twice", code="invalid_json")
    return value


async def _read(request: web.Request) -> bytes:
    # A type that browsers do not send across origins without asking first: a web page cannot use a local server.
    if request.content_type != "application/json" or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise UnsupportedMediaTypeError("the body must be sent as Content-Type: application/json, in UTF-8")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaTypeError("the body must be sent without Content-Encoding")
    limit = request.client_max_size
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError as error:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_TIMEOUT_S:g} seconds") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except web.RequestPayloadError as error:
        raise InvalidRequestError("the body is not transferred correctly", code="invalid_body") from error


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit} bytes (--max-body-mb)")


def _check_shape(body: bytes) -> int:
    """Refuse text that would be expensive to parse; returns how many ``name: value`` pairs it holds."""
    # Backslashes come in pairs from the left, so what is left before a quote escapes it.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    # Every string stands beside a comma, colon or bracket of its own.
    if unescaped.count(b'"') > 2 * MAX_JSON_VALUES:
        raise _too_many()
    outside_strings = b"".join(unescaped.split(b'"')[::2])
    names = outside_strings.count(b":")
    brackets = outside_strings.translate(None, _NOT_BRACKETS)
    if outside_strings.count(b",") + names + len(brackets) > MAX_JSON_VALUES:
        raise _too_many()
    depth = max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
    if depth > MAX_JSON_DEPTH:
        raise InvalidRequestError(
            f"the body is nested {depth} levels deep; allowed: up to {MAX_JSON_DEPTH}", code="invalid_json"
        )
    return names


def _too_many() -> InvalidRequestError:
    return InvalidRequestError(f"the body holds more than {MAX_JSON_VALUES} values", code="invalid_json")


def _count_names(value: dict[str, Any], *, enough: int) -> int:
    """Names in all objects, counted until there are ``enough``: a repeated name is one that went missing."""
    found = 0
    waiting: list[Any] = [value]
    while waiting and found < enough:
        item = waiting.pop()
        if isinstance(item, dict):
            found += len(item)
            waiting.extend(inner for inner in item.values() if isinstance(inner, dict | list))
        else:
            waiting.extend(inner for inner in item if isinstance(inner, dict | list))
    return found
