"""What carries out single system operations: the interface both backends implement, and their choice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

BackendName = Literal["io_uring", "threads"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Operation:
    """One system call's worth of work. ``buffers`` are aligned pieces of memory, read into or written from in order."""

    kind: Literal["read", "write", "fsync"]
    descriptor: int
    offset: int
    buffers: Sequence[memoryview]


class Backend(Protocol):
    """Starts operations; at most the queue depth it was made for at a time."""

    @property
    def name(self) -> BackendName: ...

    def start(self, operation: Operation) -> asyncio.Future[int]:
        """Begin; the future gets the bytes moved, or a negative errno. It is never cancelled from outside."""
        ...

    def cancel(self, future: asyncio.Future[int]) -> None:
        """Ask for an operation to end early; it may not. Its future is set when the system is done with its memory."""
        ...

    async def close(self) -> None:
        """Wait for everything that runs, then free the system's resources."""
        ...


def open_backend(wanted: Literal["auto", "io_uring", "threads"], depth: int) -> Backend:
    """io_uring where there is one, else threads; says which. OSError if ``io_uring`` is wanted and there is none."""
    from metrale_storage.thread_backend import ThreadBackend

    if wanted == "threads":
        return ThreadBackend(depth)
    try:
        from metrale_storage.uring_backend import UringBackend

        backend: Backend = UringBackend(depth)
    except (ImportError, OSError) as error:
        if wanted == "io_uring":
            raise OSError(f"io_uring cannot be used here: {error}") from error
        logger.info("storage backend: threads (io_uring cannot be used here: %s)", error)
        return ThreadBackend(depth)
    logger.info("storage backend: io_uring")
    return backend
