"""A real server on a real socket over the scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from openai import AsyncOpenAI

from metrale_async.api import Metrics, ServerArgs, build_app
from metrale_async.api.server import start_site
from metrale_async.engine import AsyncEngine, EngineArgs
from tests.support.scripted_engine import scripted_engine


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until something holds; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0)


@dataclass
class Server:
    engine: AsyncEngine
    app: web.Application
    host: str
    port: int
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def openai(self, api_key: str = "unused") -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20)

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        """Status and JSON of a request."""
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(path, **options) as response:
            return response.status, await response.json()

    async def metric(self, name: str) -> float:
        async with self.http.get("/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[-1])
        raise KeyError(name)


@contextlib.asynccontextmanager
async def served(
    engine_args: EngineArgs | None = None, server_args: ServerArgs | None = None, *, start: bool = True, **parts: Any
) -> AsyncIterator[Server]:
    """``parts`` are those of ``scripted_engine``."""
    metrics = Metrics()
    engine = scripted_engine(args=engine_args, observer=metrics, **parts)
    app = build_app(engine, server_args, metrics)
    runner, _ = await start_site(app, "127.0.0.1", 0)
    try:
        host, port = runner.addresses[0][:2]
        if start:
            await engine.start()
        async with aiohttp.ClientSession(f"http://{host}:{port}") as http:
            yield Server(engine, app, host, port, http)
    finally:
        await engine.close()
        await runner.cleanup()
    if start:
        engine.check()
        statistics = engine.statistics()
        assert statistics.kv_blocks.used == statistics.prefix_cache.evictable_blocks
