"""Memory for direct I/O: page-aligned buffers of one size, lent out one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from collections import deque
from types import TracebackType
from typing import Final, Self

ALIGNMENT: Final = 4096
"""What O_DIRECT wants of addresses, offsets and lengths on every common device."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BufferLease:
    """One buffer in use. Releasing it twice is harmless; its memory must not be touched afterwards."""

    __slots__ = ("_pool", "memory")

    def __init__(self, pool: BufferPool, memory: memoryview) -> None:
        self._pool: BufferPool | None = pool
        self.memory = memory
        """Writable, aligned; ``torch.frombuffer(lease.memory, dtype=...)`` views it without a copy."""

    def release(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool._give_back(self.memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class BufferPool:
    """``count`` buffers of ``buffer_bytes`` (rounded up to the alignment) in one mapping.

    Whoever asks for one when all are lent waits, first come, first served.
    """

    def __init__(self, count: int, buffer_bytes: int) -> None:
        if count < 1 or buffer_bytes < 1:
            raise ValueError(f"a buffer pool needs buffers: {count} of {buffer_bytes} bytes")
        self.buffer_bytes = aligned(buffer_bytes)
        self._mapping = mmap.mmap(-1, count * self.buffer_bytes)
        whole = memoryview(self._mapping)
        self.memory = whole
        self._free = deque(whole[i * self.buffer_bytes : (i + 1) * self.buffer_bytes] for i in range(count))
        self.count = count
        self._waiters: deque[asyncio.Future[memoryview]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def acquire(self) -> BufferLease:
        """A lease; cancelling the wait leaves nothing behind."""
        if self._free and not self._waiters:
            return BufferLease(self, self._free.popleft())
        waiter: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return BufferLease(self, await waiter)
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._give_back(waiter.result())
            else:
                with contextlib.suppress(ValueError):  # a buffer given back meanwhile has passed it over
                    self._waiters.remove(waiter)
            raise

    def _give_back(self, memory: memoryview) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(memory)
                return
        self._free.append(memory)
