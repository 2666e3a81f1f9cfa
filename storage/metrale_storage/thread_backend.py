"""The same operations by blocking calls on threads, for systems without io_uring."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from metrale_storage.backend import BackendName, Operation

MAX_THREADS: Final = 16


class ThreadBackend:
    """preadv, pwritev and fsync on a pool of threads."""

    name: BackendName = "threads"

    def __init__(self, depth: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(min(depth, MAX_THREADS), thread_name_prefix="metrale-storage")
        self._running: set[asyncio.Future[int]] = set()

    def start(self, operation: Operation) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        self._running.add(future)

        def work() -> None:
            result = _carry_out(operation)
            self._loop.call_soon_threadsafe(self._finish, future, result)

        self._threads.submit(work)
        return future

    def cancel(self, future: asyncio.Future[int]) -> None:
        """A blocking call cannot be called off; its end is waited for."""

    async def close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        self._threads.shutdown(wait=False)

    def _finish(self, future: asyncio.Future[int], result: int) -> None:
        self._running.discard(future)
        if not future.done():
            future.set_result(result)


def _carry_out(operation: Operation) -> int:
    try:
        if operation.kind == "read":
            return os.preadv(operation.descriptor, list(operation.buffers), operation.offset)
        if operation.kind == "write":
            return os.pwritev(operation.descriptor, list(operation.buffers), operation.offset)
        os.fsync(operation.descriptor)
    except OSError as error:
        return -(error.errno or 5)
    return 0
