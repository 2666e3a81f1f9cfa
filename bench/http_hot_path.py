"""What HTTP costs the event loop per streamed token: processor time of a whole server without a model, less that of the
engine alone with the same requests.

    PYTHONPATH=.:kernels:storage python bench/http_hot_path.py

The floor is one ``send`` of the event's bytes per token, which a bare loop over as many sockets gives; the target is
15 microseconds a token at 64 streams.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time

import uvloop

from metrale_async.api import Metrics, ServerArgs, build_app
from metrale_async.api.server import start_site
from metrale_async.engine import EngineArgs, SamplingParams
from tests.support.scripted_engine import scripted_engine

STREAMS = 64
TOKENS = 1000
STEP_S = 0.004
EVENT_BYTES = 210


def engine(metrics: Metrics):  # type: ignore[no-untyped-def]
    return scripted_engine(
        args=EngineArgs(),
        observer=metrics,
        num_blocks=STREAMS * (TOKENS // 16 + 4),
        max_batch_size=STREAMS,
        max_seq_len=TOKENS + 64,
        step_s=lambda plan: STEP_S,
        verify=False,
    )


def clients(port: int) -> None:
    """64 requests on 64 sockets, read as fast as they come, in a process of their own."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        messages = [{"role": "user", "content": "hello"}]
        fields = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.0}
        body = json.dumps(fields).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while await reader.read(65536):
            pass
        writer.close()

    async def main() -> None:
        await asyncio.gather(*(one() for _ in range(STREAMS)))

    uvloop.run(main())


async def over_http() -> float:
    metrics = Metrics()
    async with engine(metrics) as served:
        runner, url = await start_site(build_app(served, ServerArgs(), metrics), "127.0.0.1", 0)
        process = multiprocessing.get_context("spawn").Process(target=clients, args=(int(url.rsplit(":", 1)[1]),))
        process.start()
        before_s = time.process_time()
        await asyncio.to_thread(process.join)
        spent_s = time.process_time() - before_s
        await runner.cleanup()
    return spent_s


async def engine_alone() -> float:
    metrics = Metrics()
    async with engine(metrics) as served:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)

        async def one() -> None:
            async with served.submit(b"user: hello\nassistant: ", params) as stream:
                while await stream.next_batch():
                    pass

        before_s = time.process_time()
        await asyncio.gather(*(one() for _ in range(STREAMS)))
        return time.process_time() - before_s


def bare_sends() -> float:
    pairs = [socket.socketpair() for _ in range(STREAMS)]
    event = bytes(EVENT_BYTES)
    spent_s = 0.0
    for _ in range(TOKENS):
        before_s = time.process_time()
        for sender, _receiver in pairs:
            sender.send(event)
        spent_s += time.process_time() - before_s
        for _sender, receiver in pairs:
            receiver.recv(65536)
    return spent_s


def main() -> None:
    tokens = STREAMS * TOKENS
    floor_us = bare_sends() / tokens * 1e6
    alone_us = uvloop.run(engine_alone()) / tokens * 1e6
    whole_us = uvloop.run(over_http()) / tokens * 1e6
    http_us = whole_us - alone_us
    print(f"{STREAMS} streams of {TOKENS} tokens, microseconds of processor time per token")
    print(f"  engine without a model  {alone_us:6.1f}")
    print(f"  with HTTP               {whole_us:6.1f}")
    print(f"  HTTP                    {http_us:6.1f}   target 15, floor (bare sends) {floor_us:.1f}")


if __name__ == "__main__":
    main()
