"""A backend over a real file that fails on command: the n-th operation gets an error, is cut short, torn, flipped."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Literal

from metrale_storage.backend import BackendName, Operation

Fault = Literal["EIO", "ENOSPC", "short", "torn", "flip", "late"]
FAULTS: tuple[Fault, ...] = ("EIO", "ENOSPC", "short", "torn", "flip", "late")


class ScriptedBackend:
    """Carries operations out at once, except the ``fault_at``-th, to which ``fault`` happens."""

    name: BackendName = "threads"

    def __init__(self, fault: Fault | None = None, fault_at: int = -1) -> None:
        self.fault = fault
        self.fault_at = fault_at
        self.count = 0
        self.cancelled = 0
        self._late: list[Callable[[], None]] = []

    @property
    def fault_happened(self) -> bool:
        return self.count > self.fault_at

    def start(self, operation: Operation) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        fault = self.fault if self.count == self.fault_at else None
        self.count += 1

        def finish() -> None:
            future.set_result(self._carry_out(operation, fault))

        if fault == "late":
            self._late.append(finish)
            asyncio.get_running_loop().call_later(0.02, self.let_go)
        else:
            finish()
        return future

    def let_go(self) -> None:
        late, self._late = self._late, []
        for finish in late:
            finish()

    def cancel(self, future: asyncio.Future[int]) -> None:
        self.cancelled += 1

    async def close(self) -> None:
        self.let_go()

    def _carry_out(self, operation: Operation, fault: Fault | None) -> int:
        if fault in ("EIO", "ENOSPC"):
            return -(errno.EIO if fault == "EIO" else errno.ENOSPC)
        buffers = list(operation.buffers)
        if operation.kind == "fsync":
            return 0
        move = os.preadv if operation.kind == "read" else os.pwritev
        if fault in ("short", "torn"):
            # Short: the system says so and is asked to go on. Torn: it claims to have done everything.
            part = buffers[0][: max(1, len(buffers[0]) // 8192) * 4096]
            moved = move(operation.descriptor, [part], operation.offset)
            return moved if fault == "short" else sum(map(len, buffers))
        moved = move(operation.descriptor, buffers, operation.offset)
        if fault == "flip":
            if operation.kind == "read":
                buffers[-1][len(buffers[-1]) // 2] ^= 4
            else:
                place = operation.offset + moved // 2
                byte = bytearray(os.pread(operation.descriptor, 1, place))
                byte[0] ^= 4
                os.pwrite(operation.descriptor, bytes(byte), place)
        return moved
