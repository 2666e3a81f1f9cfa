"""Clients that read slowly, or not at all: what they hold is bounded, in bytes and in time, and others do not wait."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from metrale_async.api import build_app, generation, sending
from metrale_async.api.generation import read_streams
from metrale_async.api.limits import (
    KEEP_ALIVE_PROBE_INTERVAL_S,
    KEEP_ALIVE_PROBE_S,
    KEEP_ALIVE_PROBES,
    MAX_INLINE_LOGPROBS,
    SEND_TIMEOUT_S,
)
from metrale_async.api.listening import listening_sockets
from metrale_async.api.sending import PIECE_BYTES, ClientLeftError
from metrale_async.api.server import start_site
from metrale_async.engine import OutputDelta
from tests.api.server import Server, served, until
from tests.api.test_cancellation import RawClient
from tests.support.scripted_engine import scripted_engine

PARTS = {"num_blocks": 2048, "max_seq_len": 16384, "verify": False, "step_s": lambda plan: 0.0}
# Six megabytes in one event, or in one whole answer: more than the buffers of both systems hold.
LONG = {"prompt": "ab" * 7500, "max_tokens": 2, "echo": True, "logprobs": 20}


def handlers() -> list[asyncio.Task]:
    return [task for task in asyncio.all_tasks() if "_handle_request" in task.get_coro().__qualname__]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_of_a_long_answer_is_dropped(stream, monkeypatch, log):
    monkeypatch.setattr(sending, "SEND_TIMEOUT_S", 0.2)
    out = log("json")
    async with served(**PARTS) as server:
        client = unreading(server)
        await client.send("/v1/completions", {**LONG, "stream": stream})
        await until(out.getvalue)
        assert not handlers()
        assert server.engine.statistics().requests_active == 0
        client.socket.close()
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert line["status"] == 499
    assert line["left"] == "the client took nothing for 0.2 seconds"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_of_a_long_answer_leaves_nothing(stream, log):
    out = log("json")
    async with served(**PARTS) as server:
        client = unreading(server)
        await client.send("/v1/completions", {**LONG, "stream": stream})
        await client.read_until(b"text_completion")
        client.leave("reset")
        await until(out.getvalue)
        await until(lambda: not handlers())
    assert json.loads(out.getvalue())["status"] == 499


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_slowly_gets_all_of_a_long_answer(stream):
    async with served(**PARTS) as server:
        async with server.http.post("/v1/completions", json=LONG) as response:
            expected = (await response.json())["choices"][0]["logprobs"]
            assert response.content_length == len(await response.read()) > 2**20
        client = unreading(server)
        await client.send("/v1/completions", {**LONG, "stream": stream})
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n" if stream else b'"cached_tokens":0}}}'):
            received += await asyncio.get_running_loop().sock_recv(client.socket, 4096)
            await asyncio.sleep(0)
        client.socket.close()
        assert received.count(b"ab" * 7500) == 1
        assert received.count(b'"text_offset"') >= 1
        if not stream:
            assert json.loads(received.split(b"\r\n\r\n", 1)[1])["choices"][0]["logprobs"] == expected


@pytest.mark.parametrize("extra", [-1, 0, 1])
async def test_an_answer_of_any_length_arrives_whole(extra):
    async with served(**PARTS) as server:
        # Of a byte each, so that the answer's length can be chosen.
        around = len(await raw_post(server, "/detokenize", {"tokens": [97]}))
        count = PIECE_BYTES + extra - around + 1
        body = await raw_post(server, "/detokenize", {"tokens": [97] * count})
        assert len(body) == PIECE_BYTES + extra
        assert json.loads(body) == {"prompt": "a" * count}


class ReadyDeltas:
    """Deltas that are all there at once."""

    def __init__(self, count: int) -> None:
        self._left = [OutputDelta("r", 0, "x", (number,)) for number in range(count)]

    async def next_batch(self) -> list[OutputDelta]:
        batch, self._left = self._left, []
        return batch


@pytest.mark.parametrize("values", [1, 22])
async def test_what_piled_up_is_sent_in_order_and_in_pieces_that_do_not_hold_the_loop(values):
    pieces = []

    async def on_batch(index, batch):
        pieces.append([delta.token_ids[0] for delta in batch])

    count = 2 * MAX_INLINE_LOGPROBS + 1
    await read_streams([ReadyDeltas(count)], on_batch, values)
    assert [token for piece in pieces for token in piece] == list(range(count))
    assert max(map(len, pieces)) == MAX_INLINE_LOGPROBS // values


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize(("extra", "accepted"), [(-1, True), (0, True), (1, False)])
async def test_a_client_further_behind_than_allowed_is_dropped(streams, extra, accepted, monkeypatch):
    monkeypatch.setattr(generation, "MAX_BACKLOG_VALUES", 6000)
    seen = 0

    async def on_batch(index, batch):
        nonlocal seen
        seen += len(batch)

    late = [ReadyDeltas(6000 // 3 // streams + extra), *(ReadyDeltas(1) for _ in range(streams - 1))]
    if accepted:
        await read_streams(late, on_batch, 3)
        assert seen == 6000 // 3 // streams + extra + streams - 1
    else:
        with pytest.raises(ClientLeftError, match="too slowly"):
            await read_streams(late, on_batch, 3)


async def test_connections_are_set_up_to_notice_a_machine_that_is_gone():
    engine = scripted_engine()
    runner, url = await start_site(build_app(engine), "127.0.0.1", 0)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        await until(lambda: runner.server.connections)
        accepted = runner.server.connections[0].transport.get_extra_info("socket")
        found = {
            name: accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert found == {
            "TCP_KEEPIDLE": KEEP_ALIVE_PROBE_S,
            "TCP_KEEPINTVL": KEEP_ALIVE_PROBE_INTERVAL_S,
            "TCP_KEEPCNT": KEEP_ALIVE_PROBES,
            "TCP_USER_TIMEOUT": SEND_TIMEOUT_S * 1000,
        }
        writer.close()
    finally:
        await runner.cleanup()
        await engine.close()


async def test_every_address_of_a_host_is_listened_on_and_a_refused_one_leaves_no_socket(monkeypatch):
    loop = asyncio.get_running_loop()
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")

    async def two_addresses(host, port, **options):
        return [(*kind, ("127.0.0.1", port)), (*kind, ("127.0.0.2", port)), (*kind, ("127.0.0.2", port))]

    monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
    sockets = await listening_sockets("twice", 0)
    assert [one.getsockname()[0] for one in sockets] == ["127.0.0.1", "127.0.0.2"]
    sockets[1].listen()
    port = sockets[1].getsockname()[1]
    sockets[0].close()
    with pytest.raises(OSError, match="in use"):
        await listening_sockets("twice", port)
    # The address that was bound first is free again.
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))
    sockets[1].close()


async def raw_post(server: Server, path: str, body: dict) -> bytes:
    async with server.http.post(path, json=body) as response:
        assert response.status == 200
        data = await response.read()
        assert response.content_length == len(data)
        return data


def unreading(server: Server) -> RawClient:
    client = RawClient(server)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return client
