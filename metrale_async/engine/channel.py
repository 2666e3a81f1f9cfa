"""Where a request's deltas wait for their reader."""

from __future__ import annotations

import asyncio

from metrale_async.engine.outputs import OutputDelta
from metrale_async.errors import EngineError


class DeltaChannel:
    """One writer (the step loop), one reader. Never holds more than the request's tokens plus one delta per choice."""

    def __init__(self) -> None:
        self._ready: list[OutputDelta] = []
        self._error: EngineError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Nothing more will be pushed; what is ready can still be read."""
        return self._ended

    def push(self, delta: OutputDelta) -> None:
        self._ready.append(delta)
        self._wake()

    def end(self, error: EngineError | None = None) -> None:
        """Nothing follows; the reader gets what is ready first, then ``error`` if there is one."""
        self._ended = True
        self._error = error
        self._wake()

    async def next_batch(self) -> list[OutputDelta]:
        """All deltas that are ready, at least one; an empty list after the last."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._ended:
                return []
            if self._waiter is not None:
                raise RuntimeError("a generation stream has one reader")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        ready, self._ready = self._ready, []
        return ready

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
