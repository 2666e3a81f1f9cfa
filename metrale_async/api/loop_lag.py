"""How late the event loop is: a timer that should fire every so often, and by how much it does not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.05


async def measure_loop_lag(
    observe: Callable[[float], None],
    interval_s: float = INTERVAL_S,
    # Not the loop's own time, which uvloop reads once per round and in whole milliseconds.
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Report the lag in seconds after every interval, until cancelled."""
    while True:
        due_s = clock() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, clock() - due_s))
