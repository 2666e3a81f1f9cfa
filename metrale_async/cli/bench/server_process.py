"""Our own server as a child process, for benchmarks that bring none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

from metrale_async.cli.bench.load import BenchmarkError

READY_TIMEOUT_S: Final = 300.0
STOP_TIMEOUT_S: Final = 20.0
_POLL_S: Final = 0.005
_LOG_TAIL_BYTES: Final = 4000


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server; times are seconds of the monotonic clock."""

    base_url: str
    process_id: int
    started_s: float
    ready_s: float
    """When /health first answered 200."""


@contextlib.asynccontextmanager
async def server_process(model: str, flags: Sequence[str] = ()) -> AsyncIterator[ServerProcess]:
    """Start ``serve`` on a free port, wait until it is healthy, and stop it on leaving; raises BenchmarkError."""
    port = _free_port()
    command = [sys.executable, "-m", "metrale_async", "serve", model, "--port", str(port), *flags]
    with tempfile.TemporaryFile() as log:
        started_s = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=asyncio.subprocess.STDOUT
        )
        try:
            origin = f"http://127.0.0.1:{port}"
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await _wait_until_healthy(f"{origin}/health", process)
            except (BenchmarkError, TimeoutError) as error:
                log.seek(max(0, log.seek(0, 2) - _LOG_TAIL_BYTES))
                tail = log.read().decode("utf-8", "replace")
                raise BenchmarkError(f"the server did not become healthy: {error}\n{tail}") from error
            yield ServerProcess(f"{origin}/v1", process.pid, started_s, time.perf_counter())
        finally:
            await _stop(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _wait_until_healthy(url: str, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
    raise BenchmarkError(f"it ended with exit code {process.returncode}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
