"""io_uring on an asyncio loop: submissions are collected for one turn of the loop, completions announce themselves on
an eventfd the loop watches."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Final

import liburing

from metrale_storage.backend import BackendName, Operation

CANCEL_TAG: Final = 2**63
"""User data of cancel requests; their own completions mean nothing."""


class UringBackend:
    """One ring with one eventfd. Belongs to the loop it is made on."""

    name: BackendName = "io_uring"

    def __init__(self, depth: int) -> None:
        """Raises OSError where the kernel has no io_uring or forbids it."""
        self._loop = asyncio.get_running_loop()
        self._ring = liburing.Ring()
        # Twice the depth: every operation may be followed by a request to cancel it.
        liburing.io_uring_queue_init(2 * depth, self._ring, 0)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        liburing.io_uring_register_eventfd(self._ring, self._event)
        self._completion = liburing.Cqe()
        # The kernel reads iovecs and memory until it is done with them, so they are kept here until then.
        self._running: dict[int, tuple[asyncio.Future[int], object]] = {}
        self._numbers: dict[asyncio.Future[int], int] = {}
        self._next_number = 1
        self._is_flush_planned = False
        self._closed = False
        self._loop.add_reader(self._event, self._collect)

    def start(self, operation: Operation) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        number = self._next_number
        self._next_number += 1
        entry = liburing.io_uring_get_sqe(self._ring)
        kept: object = operation
        if operation.kind == "fsync":
            liburing.io_uring_prep_fsync(entry, operation.descriptor)
        else:
            vectors = liburing.Iovec(list(operation.buffers))
            prepare = liburing.io_uring_prep_readv if operation.kind == "read" else liburing.io_uring_prep_writev
            prepare(entry, operation.descriptor, vectors, operation.offset)
            kept = (operation, vectors)
        liburing.io_uring_sqe_set_data64(entry, number)
        self._running[number] = (future, kept)
        self._numbers[future] = number
        self._plan_flush()
        return future

    def cancel(self, future: asyncio.Future[int]) -> None:
        number = self._numbers.get(future)
        if number is None:
            return
        entry = liburing.io_uring_get_sqe(self._ring)
        liburing.io_uring_prep_cancel64(entry, number)
        liburing.io_uring_sqe_set_data64(entry, CANCEL_TAG)
        self._plan_flush()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._flush()
        while self._running:
            await asyncio.wait([future for future, _ in self._running.values()])
        self._loop.remove_reader(self._event)
        liburing.io_uring_queue_exit(self._ring)
        os.close(self._event)

    def _plan_flush(self) -> None:
        if not self._is_flush_planned:
            self._is_flush_planned = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        if self._is_flush_planned:
            self._is_flush_planned = False
            liburing.io_uring_submit(self._ring)

    def _collect(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        entries = liburing.io_uring_cqe_iter_init(self._ring)
        seen = 0
        while liburing.io_uring_cqe_iter_next(entries, self._completion):
            seen += 1
            completion = self._completion[0]
            number = completion.user_data
            if number == CANCEL_TAG:
                continue
            try:
                result = completion.res
            except OSError as error:  # the binding raises for a negative result
                result = -(error.errno or 5)
            future, _ = self._running.pop(number)
            del self._numbers[future]
            if not future.done():
                future.set_result(result)
        liburing.io_uring_cq_advance(self._ring, seen)
