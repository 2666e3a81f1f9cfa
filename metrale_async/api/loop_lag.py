"""How late the event loop is: a timer that should fire every so often, and by how much it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.05


async def measure_loop_lag(observe: Callable[[float], None], interval_s: float = INTERVAL_S) -> None:
    """Report the lag in seconds after every interval, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due_s))
