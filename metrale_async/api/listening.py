"""The sockets a server listens on, set up so that a client that vanishes without a word is found out."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from metrale_async.api.limits import (
    KEEP_ALIVE_PROBE_INTERVAL_S,
    KEEP_ALIVE_PROBE_S,
    KEEP_ALIVE_PROBES,
    SEND_TIMEOUT_S,
)

_OPTIONS: Final = (
    # A machine that was unplugged, or a network that forgot a connection, sends no end of it; while a request computes
    # nothing is sent that would fail. The system's own patience is two hours.
    ("TCP_KEEPIDLE", KEEP_ALIVE_PROBE_S),
    ("TCP_KEEPINTVL", KEEP_ALIVE_PROBE_INTERVAL_S),
    ("TCP_KEEPCNT", KEEP_ALIVE_PROBES),
    # The same for what was sent and is not acknowledged: a quarter of an hour otherwise.
    ("TCP_USER_TIMEOUT", int(SEND_TIMEOUT_S * 1000)),
)
"""Some systems lack some of these. Connections inherit them from the socket that accepts them."""


async def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """One bound socket for every address of ``host``, to be closed by the caller. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            listening = socket.socket(family, kind, protocol)
            sockets.append(listening)
            _set_up(listening)
            listening.bind(address)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def _set_up(listening: socket.socket) -> None:
    listening.setblocking(False)
    # A server that is started again takes its port back at once.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if listening.family == socket.AF_INET6:
        # "::" would take the IPv4 port too, which 0.0.0.0 may want.
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    for name, value in _OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
