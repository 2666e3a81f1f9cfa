"""How long /health takes while a long prompt is tokenized and prefilled and 32 streams run, and how late the loop is.

    PYTHONPATH=.:kernels:storage python bench/health_latency.py [MODEL]

The target is 50 ms for every single answer; 5 ms is what the loop may be held for.
"""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp

from metrale_async.cli.bench.server_process import server_process

STREAMS = 32
PROMPT_WORDS = 1800
"""Some 2.3 tokens each: 4,000 tokens."""
STREAM_TOKENS = 400


async def read_stream(http: aiohttp.ClientSession, base_url: str, number: int) -> None:
    body = {"prompt": f"Story number {number}:", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    async with http.post(f"{base_url}/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def prefill(http: aiohttp.ClientSession, base_url: str) -> int:
    words = " ".join(f"word{number % 97}" if number % 3 else "river" for number in range(PROMPT_WORDS))
    async with http.post(f"{base_url}/completions", json={"prompt": words, "max_tokens": 1}) as response:
        response.raise_for_status()
        return int((await response.json())["usage"]["prompt_tokens"])


async def ask_health(http: aiohttp.ClientSession, url: str, taken_ms: list[float]) -> None:
    while True:
        before_s = time.perf_counter()
        async with http.get(url) as response:
            await response.read()
        taken_ms.append((time.perf_counter() - before_s) * 1000)
        await asyncio.sleep(0.005)


async def measure(model: str) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        server_process(model) as server,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        streams = [asyncio.create_task(read_stream(http, server.base_url, number)) for number in range(STREAMS)]
        await asyncio.sleep(2)
        taken_ms: list[float] = []
        health = server.base_url.removesuffix("/v1") + "/health"
        asking = asyncio.create_task(ask_health(http, health, taken_ms))
        before_s = time.perf_counter()
        tokens = await prefill(http, server.base_url)
        prefill_s = time.perf_counter() - before_s
        asking.cancel()
        async with http.get(server.base_url.removesuffix("/v1") + "/metrics") as response:
            lag = [line for line in (await response.text()).splitlines() if "loop_lag_seconds" in line]
        still_running = sum(not stream.done() for stream in streams)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(asking, *streams, return_exceptions=True)
    taken_ms.sort()
    print(f"{tokens} prompt tokens in {prefill_s:.1f} s beside {STREAMS} streams ({still_running} still running)")
    median, p99 = taken_ms[len(taken_ms) // 2], taken_ms[int(len(taken_ms) * 0.99)]
    print(f"/health, {len(taken_ms)} answers: median {median:.1f} ms, p99 {p99:.1f} ms, worst {taken_ms[-1]:.1f} ms")
    print("\n".join(line for line in lag if not line.startswith("#")))


if __name__ == "__main__":
    asyncio.run(measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
