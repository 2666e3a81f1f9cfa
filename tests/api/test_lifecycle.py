"""The server's life as a process manager sees it: listening, loading, ready, draining, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import pytest

from metrale_async.api import Metrics, ServerArgs, run_server
from metrale_async.engine import AsyncEngine
from metrale_async.errors import ConfigurationError, ModelNotFoundError
from tests.support.scripted_engine import scripted_engine


class Running:
    """``run_server`` as a task, with the moments it reports."""

    def __init__(self, engine: AsyncEngine, metrics: Metrics, **args: object) -> None:
        self.engine = engine
        self.listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(
            run_server(
                engine,
                ServerArgs(port=0, **args),
                metrics=metrics,
                on_listening=self.listening.set_result,
                on_ready=self.ready.set_result,
            )
        )

    async def wait(self, moment: asyncio.Future[str]) -> str:
        await asyncio.wait((moment, self.task), return_when=asyncio.FIRST_COMPLETED)
        if self.task.done():
            await self.task
        return moment.result()


@pytest.fixture
async def run():
    """Starts servers, and stops those that a test leaves running."""
    started: list[Running] = []

    def start(load: Callable[[], object] | None = None, *, drain_timeout: float = 15, **parts: object) -> Running:
        metrics = Metrics()
        engine = scripted_engine(observer=metrics, **parts)
        if load is not None:
            begin = engine.start

            async def start_slowly() -> None:
                await load()
                await begin()

            engine.start = start_slowly
        started.append(Running(engine, metrics, drain_timeout=drain_timeout))
        return started[-1]

    yield start
    for running in started:
        running.task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await running.task


async def status_of(http: aiohttp.ClientSession, url: str, path: str) -> int:
    async with http.get(url + path) as response:
        return response.status


async def test_it_listens_at_once_and_is_healthy_when_the_first_request_can_be_served(run):
    may_load = asyncio.Event()
    running = run(may_load.wait)
    url = await running.wait(running.listening)
    async with aiohttp.ClientSession() as http:
        assert await status_of(http, url, "/health/live") == 200
        assert await status_of(http, url, "/health") == 503
        assert await status_of(http, url, "/metrics") == 200
        async with http.post(url + "/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "server_error"
        may_load.set()
        await running.wait(running.ready)
        assert await status_of(http, url, "/health") == 200
        async with http.post(url + "/v1/completions", json={"prompt": "a"}) as response:
            assert response.status == 200


async def test_a_signal_while_loading_ends_it(run):
    running = run(asyncio.Event().wait)
    await running.wait(running.listening)
    os.kill(os.getpid(), signal.SIGTERM)
    await running.task


async def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(run):
    async def fail() -> None:
        raise ModelNotFoundError("no such model")

    with pytest.raises(ModelNotFoundError):
        await run(fail).task


async def test_a_port_in_use_is_refused_by_flag(run):
    running = run()
    port = int((await running.wait(running.ready)).rsplit(":", 1)[1])
    with pytest.raises(ConfigurationError, match="--port"):
        await run_server(scripted_engine(), ServerArgs(port=port))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_running_requests_finish_and_new_ones_are_refused(run, number):
    running = run(step_s=lambda plan: 0.002)
    url = await running.wait(running.ready)
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with http.post(url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            os.kill(os.getpid(), number)
            while await status_of(http, url, "/health") != 503:
                pass
            assert await status_of(http, url, "/health/live") == 200
            async with http.post(url + "/v1/completions", json={"prompt": "a"}) as refused:
                assert refused.status == 503
                assert refused.headers["Retry-After"]
            text = await response.text()
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    await running.task


@pytest.mark.parametrize("second_signal", [False, True])
async def test_what_does_not_finish_in_time_gets_an_error_event(run, second_signal):
    running = run(
        step_s=lambda plan: 0.01, max_seq_len=100_000, num_blocks=10_000, drain_timeout=60 if second_signal else 0.05
    )
    url = await running.wait(running.ready)
    async with aiohttp.ClientSession() as http:
        body = {"prompt": "a", "max_tokens": 90_000, "stream": True, "ignore_eos": True}
        async with http.post(url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            os.kill(os.getpid(), signal.SIGTERM)
            if second_signal:
                while await status_of(http, url, "/health") != 503:
                    pass
                os.kill(os.getpid(), signal.SIGTERM)
            *_, error, done, rest = (await response.text()).split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert (done, rest) == ("data: [DONE]", "")
    await running.task


async def test_an_idle_connection_does_not_keep_it_from_ending(run):
    running = run()
    url = await running.wait(running.ready)
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(10):
        await running.task
    writer.close()
