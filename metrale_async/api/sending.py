"""Bytes to one client, who may have left, read slowly, or not read at all. No write waits for ever."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from metrale_async.api.limits import SEND_BUFFER_BYTES, SEND_TIMEOUT_S

PIECE_BYTES: Final = SEND_BUFFER_BYTES // 2
"""Written at once. With the few bytes around it, a piece fits the buffer if that is empty."""


class ClientLeftError(ConnectionError):
    """The client closed its connection, or takes too little."""


async def send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write to a prepared response, waiting while more than SEND_BUFFER_BYTES are unsent. Raises ClientLeftError."""
    if len(data) <= PIECE_BYTES:
        await _send_piece(request, response, data)
        return
    whole = memoryview(data)
    for start in range(0, len(data), PIECE_BYTES):
        await _send_piece(request, response, bytes(whole[start : start + PIECE_BYTES]))
        # A client on the same machine may take everything at once, and others have their turn too.
        await asyncio.sleep(0)


async def send_end(request: web.Request, response: web.StreamResponse) -> None:
    """End a prepared response. Raises ClientLeftError."""
    await _in_time(request, response, None)


async def send_whole(request: web.Request, response: web.Response) -> web.StreamResponse:
    """Send a response that is too long for the buffer; others are returned, for the server to send.
    Raises ClientLeftError."""
    body = response.body
    if not isinstance(body, bytes) or len(body) <= PIECE_BYTES or request.method == "HEAD":
        return response
    streamed = web.StreamResponse(status=response.status, headers=response.headers)
    streamed.content_length = len(body)
    await begin(request, streamed)
    await send(request, streamed, body)
    await send_end(request, streamed)
    return streamed


async def begin(request: web.Request, response: web.StreamResponse) -> None:
    """Write the response's head, and set the buffer's size."""
    _transport(request).set_write_buffer_limits(high=SEND_BUFFER_BYTES)
    await response.prepare(request)


async def _send_piece(request: web.Request, response: web.StreamResponse, piece: bytes) -> None:
    if _transport(request).get_write_buffer_size() == 0:
        # There is room for it, so this does not wait; saves a timer for every token.
        try:
            await response.write(piece)
        except ConnectionError as error:
            raise ClientLeftError("the client closed the connection") from error
    else:
        await _in_time(request, response, piece)


async def _in_time(request: web.Request, response: web.StreamResponse, piece: bytes | None) -> None:
    transport = _transport(request)
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await (response.write_eof() if piece is None else response.write(piece))
    except TimeoutError as error:
        transport.abort()
        raise ClientLeftError(f"the client took nothing for {SEND_TIMEOUT_S:g} seconds") from error
    except ConnectionError as error:
        raise ClientLeftError("the client closed the connection") from error


def _transport(request: web.Request) -> asyncio.WriteTransport:
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ClientLeftError("the client closed the connection")
    return transport
