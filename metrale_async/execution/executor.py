"""The executor interface: where steps run. ``LocalExecutor`` (this process's device) and ``ScriptedExecutor`` (no
model, for simulation and host-side benchmarks) implement it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from metrale_async.execution.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps strictly in the order of submission."""

    async def start(self) -> None:
        """Be ready for the first step, with everything compiled and touched that would slow it down."""
        ...

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """Queue one step and return at once; the future is set when it has run.

        Faults of a chunk come back in its ChunkResult; an exception of the future means that the executor as a
        whole is broken.
        """
        ...

    async def close(self) -> None:
        """Finish what was submitted, then let go of the device."""
        ...
