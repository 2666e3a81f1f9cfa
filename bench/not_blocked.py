"""How long /health takes while 32 streams run and a 4,000-token prompt is tokenized and prefilled; the bound is 50 ms.

python bench/not_blocked.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
import time

import aiohttp

from metrale_async.cli.bench.server_process import server_process

STREAMS = 32
LONG_PROMPT_WORDS = 4000
POLL_S = 0.01


async def stream(session: aiohttp.ClientSession, url: str) -> None:
    body = {"prompt": "The river", "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            pass


async def measure(url: str) -> None:
    latencies_ms: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        running = [asyncio.create_task(stream(session, url)) for _ in range(STREAMS)]
        await asyncio.sleep(1.5)
        body = {"prompt": " river" * LONG_PROMPT_WORDS, "max_tokens": 4, "temperature": 0}
        long = asyncio.create_task(session.post(f"{url}/v1/completions", json=body))
        while not long.done():
            started = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                response.raise_for_status()
                await response.read()
            latencies_ms.append((time.perf_counter() - started) * 1e3)
            await asyncio.sleep(POLL_S)
        answer = await (await long).json()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    latencies_ms.sort()
    count = len(latencies_ms)
    print(f"{STREAMS} streams, a prompt of {answer['usage']['prompt_tokens']} tokens, {count} polls of /health:")
    print(f"median {latencies_ms[count // 2]:.1f} ms, p99 {latencies_ms[count * 99 // 100]:.1f} ms, ", end="")
    print(f"longest {latencies_ms[-1]:.1f} ms (bound: 50 ms)")


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    async with server_process(model) as server:
        await measure(server.base_url.removesuffix("/v1"))


if __name__ == "__main__":
    asyncio.run(main())
