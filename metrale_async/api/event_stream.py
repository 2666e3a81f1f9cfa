"""Server-sent events to one client: nothing is sent before the first event."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import orjson
from aiohttp import web

from metrale_async.api.context import SUMMARY
from metrale_async.api.failures import error_object, unexpected_error_object
from metrale_async.api.request_log import REQUEST_ID_HEADER
from metrale_async.api.sending import ClientLeftError, begin, send, send_end
from metrale_async.errors import EngineError

DONE: Final = b"data: [DONE]\n\n"

logger = logging.getLogger(__name__)


class EventStream:
    """Sends the response's head with the first event, so that whatever fails before that is a plain error response."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # Proxies that buffer would hold tokens back.
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: request[SUMMARY].request_id,
            }
        )
        self.started = False

    async def write(self, events: bytes) -> None:
        """Send whole events. Raises ClientLeftError."""
        if not self.started:
            self.started = True
            await begin(self._request, self._response)
        await send(self._request, self._response, events)

    async def finish(self) -> web.StreamResponse:
        await self.write(DONE)
        await send_end(self._request, self._response)
        return self._response


async def send_events(request: web.Request, produce: Callable[[EventStream], Awaitable[None]]) -> web.StreamResponse:
    """Run ``produce``, which writes events. What it raises before the first one is raised from here; after that it
    becomes an error event, and the stream ends."""
    events = EventStream(request)
    try:
        await produce(events)
    except ClientLeftError:
        raise
    except EngineError as error:
        if not events.started:
            raise
        request[SUMMARY].error_code = error.code
        await events.write(sse(error_object(error)))
    except Exception:
        if not events.started:
            raise
        logger.exception("a stream failed", extra={"fields": {"request_id": request[SUMMARY].request_id}})
        request[SUMMARY].error_code = "internal_error"
        await events.write(sse(unexpected_error_object()))
    return await events.finish()


def sse(value: Any) -> bytes:
    """One event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"
