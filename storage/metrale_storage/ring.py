"""Asynchronous file I/O as coroutines: ``await ring.read(file, [buffer], offset)``.

At most ``depth`` operations are with the system at a time; more of them wait. Short transfers are continued. A
coroutine that is cancelled ends only when the system has let go of its memory, so whoever awaited it may reuse its
buffers.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from metrale_storage.backend import Backend, BackendName, Operation, open_backend
from metrale_storage.buffers import ALIGNMENT
from metrale_storage.errors import EndOfFileError, RingClosedError, file_error

MAX_DEPTH: Final = 1024
FILE_MODE: Final = 0o600
"""Files hold what users typed: nobody else may read them."""


@dataclass(frozen=True, slots=True)
class RingStatistics:
    """Totals since the ring was opened; bytes are those moved."""

    backend: BackendName
    depth: int
    running: int
    waiting: int
    reads_total: int
    read_bytes_total: int
    writes_total: int
    written_bytes_total: int
    continued_total: int
    """Transfers the system cut short, which were continued."""
    failures_total: int


class File:
    """An open file. ``direct`` says whether O_DIRECT is in use; not every file system has it."""

    def __init__(self, path: Path, descriptor: int, direct: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.direct = direct

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def open_file(path: Path, *, create: bool = False, direct: bool = True) -> File:
    """Open for reading and writing, blocking (call it on a worker thread). ``create`` makes the file, mode 0600.

    Without O_DIRECT on this file system the file is opened without it. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    if direct and hasattr(os, "O_DIRECT"):
        try:
            return File(path, os.open(path, flags | os.O_DIRECT, FILE_MODE), True)
        except OSError as error:
            if error.errno != 22:  # EINVAL: the file system does not do it
                raise
    return File(path, os.open(path, flags, FILE_MODE), False)


class Ring:
    """See the module. Made by :meth:`open` on the loop that uses it; an async context manager."""

    def __init__(self, backend: Backend, depth: int) -> None:
        self._backend = backend
        self._depth = depth
        self._places = asyncio.Semaphore(depth)
        self._closed = False
        self._running = self._waiting = self._continued = self._failures = 0
        self._reads = self._read_bytes = self._writes = self._written_bytes = 0

    @classmethod
    def open(cls, depth: int = 32, backend: Literal["auto", "io_uring", "threads"] = "auto") -> Self:
        """A ring on the running loop.

        Raises ValueError for a depth outside 1 to 1024, OSError if ``io_uring`` is wanted and the system has none.
        """
        if not 1 <= depth <= MAX_DEPTH:
            raise ValueError(f"depth is {depth}; allowed: 1 to {MAX_DEPTH}")
        return cls(open_backend(backend, depth), depth)

    @property
    def backend_name(self) -> BackendName:
        return self._backend.name

    async def read(self, file: File, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill ``buffers`` in order from ``offset``; returns the bytes read, which is all of them.

        Raises EndOfFileError, FileIOError or RingClosedError; what the buffers hold then is undefined.
        """
        total = await self._transfer("read", file, buffers, offset)
        self._reads += 1
        self._read_bytes += total
        return total

    async def write(self, file: File, buffers: Sequence[memoryview], offset: int) -> int:
        """Write ``buffers`` in order at ``offset``; returns the bytes written, which is all of them.

        Raises FileIOError (NoSpaceError on a full device) or RingClosedError; part of the data may have been written.
        """
        total = await self._transfer("write", file, buffers, offset)
        self._writes += 1
        self._written_bytes += total
        return total

    async def fsync(self, file: File) -> None:
        """Make the file's data durable. Raises FileIOError or RingClosedError."""
        result = await self._run(Operation("fsync", file.descriptor, 0, ()))
        if result < 0:
            self._failures += 1
            raise file_error("fsync", str(file.path), 0, 0, -result)

    def statistics(self) -> RingStatistics:
        return RingStatistics(
            backend=self._backend.name,
            depth=self._depth,
            running=self._running,
            waiting=self._waiting,
            reads_total=self._reads,
            read_bytes_total=self._read_bytes,
            writes_total=self._writes,
            written_bytes_total=self._written_bytes,
            continued_total=self._continued,
            failures_total=self._failures,
        )

    async def close(self) -> None:
        """Wait for what runs, then let go of the system's resources. New operations fail with RingClosedError."""
        self._closed = True
        await self._backend.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _transfer(
        self, kind: Literal["read", "write"], file: File, buffers: Sequence[memoryview], offset: int
    ) -> int:
        wanted = sum(len(buffer) for buffer in buffers)
        done = 0
        while done < wanted:
            rest = _after(buffers, done)
            result = await self._run(Operation(kind, file.descriptor, offset + done, rest))
            if result < 0:
                self._failures += 1
                raise file_error(kind, str(file.path), offset + done, wanted - done, -result)
            if result == 0:
                self._failures += 1
                if kind == "read":
                    raise EndOfFileError(str(file.path), offset, wanted, done)
                raise file_error(kind, str(file.path), offset + done, wanted - done, 5)
            end = done + result
            if end < wanted:
                self._continued += 1
                if file.direct:
                    # Direct I/O goes on at aligned places only; less than that at the end of a file is its end.
                    end = done + result // ALIGNMENT * ALIGNMENT
                    if end == done and kind == "read":
                        raise EndOfFileError(str(file.path), offset, wanted, done + result)
            done = end
        return done

    async def _run(self, operation: Operation) -> int:
        self._waiting += 1
        try:
            await self._places.acquire()
        finally:
            self._waiting -= 1
        try:
            if self._closed:
                raise RingClosedError("the ring is closed")
            self._running += 1
            try:
                return await self._finish(self._backend.start(operation))
            finally:
                self._running -= 1
        finally:
            self._places.release()

    async def _finish(self, future: asyncio.Future[int]) -> int:
        """Await an operation; if that is cancelled, first wait until the system is done with its memory."""
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._backend.cancel(future)
            while not future.done():
                # A further cancellation changes nothing: the memory is still in use.
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            raise


def _after(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``buffers`` after ``done`` bytes."""
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:] if done else buffer)
        done = max(0, done - len(buffer))
    return rest
