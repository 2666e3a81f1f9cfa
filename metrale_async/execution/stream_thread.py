"""A stream thread: one Python thread that owns one device queue.

On CUDA the thread runs inside one ``torch.cuda.Stream`` of its own; on CPU it is the thread that drives the compute
pool. Work goes in through a queue and comes back to the event loop with ``call_soon_threadsafe``.

A job has two halves: ``launch`` puts work on the device and returns ``finish``, which waits for the device and builds
the result. On CUDA launching is asynchronous, so if another job is queued it is launched before the first is finished:
the device goes from one to the next without waiting for Python. On CPU a launch *is* the computation and ``finish``
follows at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, TypeVar

import torch

R = TypeVar("R")

Launch = Callable[[], Callable[[], R]]
_Job = tuple[Launch[object], "asyncio.Future[object]"]
_Launched = tuple[Callable[[], object], "asyncio.Future[object]"]

POLL_S: Final = 0.0002
"""How often a CUDA stream thread without a queued job looks whether the device is done."""


class StreamThread:
    """Runs jobs strictly in order. ``start`` and ``submit`` belong to the event loop's thread."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, launch: Launch[R]) -> asyncio.Future[R]:
        """Queue a job; the future gets its result, or the exception of either half."""
        assert self._loop is not None, "the stream thread is not started"
        future: asyncio.Future[R] = self._loop.create_future()
        self._jobs.put((launch, future))  # type: ignore[arg-type]
        return future

    async def close(self) -> None:
        """Finish every queued job, then end the thread."""
        if self._loop is None:
            return
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream), torch.inference_mode():
                self._work(stream)
        else:
            with torch.inference_mode():
                self._work(None)

    def _work(self, stream: torch.cuda.Stream | None) -> None:
        launched: _Launched | None = None
        while True:
            if launched is None:
                job = self._jobs.get()
                if job is None:
                    return
                launched = self._launch(*job)
            ahead = self._wait_for_job_or_device(stream) if stream is not None and launched is not None else None
            next_launched = None if ahead is None else self._launch(*ahead)
            if launched is not None:
                self._finish(*launched)
            launched = next_launched

    def _wait_for_job_or_device(self, stream: torch.cuda.Stream) -> _Job | None:
        """A job that arrives while the device is busy with the last one, or None when the device is done first."""
        done = stream.record_event()
        while True:
            with contextlib.suppress(queue.Empty):
                job = self._jobs.get(timeout=POLL_S)
                if job is None:
                    self._jobs.put(None)
                return job
            if done.query():
                return None

    def _launch(self, launch: Launch[object], future: asyncio.Future[object]) -> _Launched | None:
        try:
            return launch(), future
        except BaseException as error:
            self._report(future, None, error)
            return None

    def _finish(self, finish: Callable[[], object], future: asyncio.Future[object]) -> None:
        try:
            result = finish()
        except BaseException as error:
            self._report(future, None, error)
        else:
            self._report(future, result, None)

    def _report(self, future: asyncio.Future[object], result: object, error: BaseException | None) -> None:
        assert self._loop is not None
        # The loop is gone when a program was torn down without closing its engine; nobody waits then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(_set, future, result, error)


def _set(future: asyncio.Future[object], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
