"""A client that leaves, in any phase and in any way, is gone from the engine within one step, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from metrale_async.api import sending
from tests.api.server import Server, served, until

STEP_S = 0.002
PARTS = {
    "num_blocks": 4096,
    "max_batch_size": 8,
    "max_seq_len": 16384,
    "step_s": lambda plan: STEP_S,
    # Comparing every slot with the whole history is quadratic in these long sequences.
    "verify": False,
}


class RawClient:
    """A connection without any manners."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.socket = socket.socket()
        self.socket.setblocking(False)

    async def send(self, path: str, body: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, (self._server.host, self._server.port))
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        await loop.sock_sendall(self.socket, head.encode() + data)

    async def read_until(self, mark: bytes, count: int = 1) -> None:
        seen = b""
        while seen.count(mark) < count:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
            assert data, seen
            seen += data

    def leave(self, way: str) -> None:
        if way == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if way == "half-open":
            self.socket.shutdown(socket.SHUT_WR)
        else:
            self.socket.close()


@dataclass(frozen=True)
class Phase:
    """A request, and when its client leaves."""

    name: str
    body: dict[str, Any]
    reached: Callable[[Server, RawClient], Any]


async def at_once(server: Server, client: RawClient) -> None:
    """The client may be gone before its request is read."""


async def accepted(server: Server, client: RawClient) -> None:
    await until(lambda: server.engine.statistics().requests_active > 0)


async def waiting(server: Server, client: RawClient) -> None:
    await until(lambda: server.engine.statistics().sequences_waiting > 0)


async def prefilling(server: Server, client: RawClient) -> None:
    before = server.engine.statistics()
    await until(lambda: server.engine.statistics().prompt_tokens_total > before.prompt_tokens_total)


async def decoding(server: Server, client: RawClient) -> None:
    before = server.engine.statistics().generated_tokens_total
    await until(lambda: server.engine.statistics().generated_tokens_total > before + 2)


async def reading(server: Server, client: RawClient) -> None:
    await client.read_until(b"\n\n", 4)


LONG = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
PHASES = [
    Phase("at once", {"prompt": "ab", **LONG}, at_once),
    Phase("accepted", {"prompt": "ab", **LONG}, accepted),
    # More choices than the batch has places: some wait.
    Phase("queueing", {"prompt": "ab", "n": 16, "seed": 1, **LONG, "temperature": 1}, waiting),
    Phase("queueing stream", {"prompt": "ab", "n": 16, "stream": True, **LONG, "temperature": 1}, waiting),
    Phase("prefill", {"prompt": "a" * 8000, **LONG}, prefilling),
    Phase("decode", {"prompt": "ab", **LONG}, decoding),
    Phase("decode stream", {"prompt": "ab", "stream": True, **LONG}, decoding),
    Phase("between chunks", {"prompt": "ab", "stream": True, **LONG}, reading),
    Phase("four choices", {"prompt": "ab", "n": 4, "seed": 1, "stream": True, **LONG, "temperature": 1}, reading),
    Phase("three prompts", {"prompt": ["ab", "cd", "ef"], "stream": True, **LONG}, reading),
    Phase("three prompts whole", {"prompt": ["ab", "cd", "ef"], **LONG}, decoding),
]
WAYS = ["close", "reset", "half-open"]


async def leave_in(phase: Phase, way: str, server: Server) -> None:
    """One client: reaches its phase, leaves, and is waited for until nothing of it is left in the engine."""
    engine = server.engine
    client = RawClient(server)
    try:
        await client.send("/v1/completions", phase.body)
        await phase.reached(server, client)
        steps = engine.statistics().steps_total
        client.leave(way)
        if phase.reached is at_once:
            return
        await until(lambda: engine.statistics().requests_active == 0)
        # Two steps may have been in flight.
        assert engine.statistics().steps_total - steps <= 2
        assert engine.statistics().kv_blocks.used == 0
        engine.check()
    finally:
        client.socket.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
async def test_blocks_are_free_within_one_step(phase, way):
    async with served(**PARTS) as server:
        await leave_in(phase, way, server)
        await until(lambda: server.engine.statistics().requests_active == 0)
        if phase.reached is not at_once:
            assert await server.metric("metrale_kv_blocks_used") == 0
            assert await server.metric("metrale_sequences_running") == 0
            requests = len(phase.body["prompt"]) if isinstance(phase.body["prompt"], list) else 1
            assert await server.metric("metrale_requests_aborted_total") == requests


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_takes_nothing_from_those_before_it(way, stream):
    async with served(**{**PARTS, "max_batch_size": 1}) as server:
        first = asyncio.create_task(server.post("/v1/completions", {"prompt": "ab", **LONG, "max_tokens": 60}))
        await accepted(server, None)
        client = RawClient(server)
        await client.send("/v1/completions", {"prompt": "cd", "stream": stream, **LONG})
        await waiting(server, client)
        client.leave(way)
        await until(lambda: server.engine.statistics().sequences_waiting == 0)
        assert server.engine.statistics().requests_active == 1
        status, answer = await first
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 60
        client.socket.close()


async def test_five_hundred_clients_that_leave_leave_nothing():
    async with served(**PARTS) as server:
        await server.get("/health")
        tasks = len(asyncio.all_tasks())
        descriptors = len(os.listdir("/proc/self/fd"))
        for number in range(500):
            await leave_in(PHASES[number % len(PHASES)], WAYS[number // len(PHASES) % len(WAYS)], server)
        await until(lambda: server.engine.statistics().requests_active == 0)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
        assert server.engine.statistics().kv_blocks.used == 0
        status, _ = await server.post("/v1/completions", {"prompt": "ab"})
        assert status == 200


async def test_a_client_that_reads_nothing_is_dropped_and_does_not_slow_others(monkeypatch):
    monkeypatch.setattr(sending, "SEND_TIMEOUT_S", 0.1)
    async with served(**{**PARTS, "step_s": lambda plan: 0.0}) as server:
        client = RawClient(server)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "stream": True}
        await client.send("/v1/chat/completions", {**body, "ignore_eos": True, "max_tokens": 16000})
        await accepted(server, client)
        status, answer = await server.post("/v1/completions", {"prompt": "ab", **LONG, "max_tokens": 50})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 50)
        await until(lambda: server.engine.statistics().requests_active == 0)
        assert server.engine.statistics().requests_aborted_total == 1
        assert server.engine.statistics().kv_blocks.used == 0
        client.socket.close()
