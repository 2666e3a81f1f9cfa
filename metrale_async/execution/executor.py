"""The executor interface: where steps run. ``LocalExecutor`` (this process's device) and ``ScriptedExecutor`` (no
model, for simulation and host-side benchmarks) implement it."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from metrale_async.execution.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs steps strictly in the order of submission."""

    async def start(self) -> None:
        """Be ready for the first step, with everything compiled and touched that would slow it down."""
        ...

    def submit(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Queue one step and return at once; awaiting the result does not start anything.

        Faults of a chunk come back in its ChunkResult; an exception from the awaitable means that the executor as a
        whole is broken.
        """
        ...

    async def close(self) -> None:
        """Finish what was submitted, then let go of the device."""
        ...
