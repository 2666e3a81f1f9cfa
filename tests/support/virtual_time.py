"""An asyncio event loop on virtual time: sleeping costs nothing, and a run depends on its seed alone."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for a timer, moves the clock to it. Nothing in a simulation waits for a file descriptor."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.now_s += timeout
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0 and moves only when nothing is left to do."""

    def __init__(self) -> None:
        self._jumping_selector = _JumpingSelector()
        super().__init__(self._jumping_selector)

    def time(self) -> float:
        return self._jumping_selector.now_s


def run_on_virtual_time(main: Coroutine[Any, Any, R]) -> R:
    """``asyncio.run`` on a fresh virtual-time loop."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
