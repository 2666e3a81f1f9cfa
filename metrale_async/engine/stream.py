"""What the owner of a request holds: its deltas, and the means to leave it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from metrale_async.engine.channel import DeltaChannel
from metrale_async.engine.outputs import ChoiceOutput, OutputDelta, RequestOutput, Usage
from metrale_async.execution import TokenLogprobs


class GenerationStream:
    """A request's deltas as an async iterator that can be left at any time.

    Leaving (``aclose``, ``abort``, an ``async with`` block, or dropping the last reference to the stream, which is what
    ``break`` in an ``async for`` over it does) ends the request at once: its blocks and slots are free when the call
    returns. The engine itself holds no reference to this object.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: Sequence[int], channel: DeltaChannel, abort: Callable[[str], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._channel = channel
        self._abort = abort
        self._left = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._taken: deque[OutputDelta] = deque()

    async def next_batch(self) -> list[OutputDelta]:
        """All deltas that are ready, at least one; an empty list after the last or after ``abort``.

        Raises the EngineError that failed the request. Cancelling the wait does not end the request: leaving does.
        """
        if self._left:
            return []
        return await self._channel.next_batch()

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if not self._taken:
            self._taken.extend(await self.next_batch())
            if not self._taken:
                raise StopAsyncIteration
        return self._taken.popleft()

    def abort(self) -> None:
        """End the request now and free what it holds; harmless when it has ended."""
        if self._left:
            return
        self._left = True
        self._taken.clear()
        if not self._channel.ended:
            self._channel.end()
            self._abort(self.request_id)

    async def aclose(self) -> None:
        """:meth:`abort`, for ``contextlib.aclosing``."""
        self.abort()

    async def __aenter__(self) -> GenerationStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        # An exception in __init__ leaves an object without attributes.
        if getattr(self, "_left", True) or self._channel.ended:
            return
        if threading.get_ident() == self._thread:
            self.abort()
        elif not self._loop.is_closed():
            # The cycle collector runs in whichever thread allocates; the engine belongs to the loop's.
            self._loop.call_soon_threadsafe(self._abort, self.request_id)

    async def collect(self) -> RequestOutput:
        """Read to the end and join the deltas; leaves the request if reading is cancelled or fails."""
        joined: dict[int, list[OutputDelta]] = {}
        usage = Usage(len(self.prompt_token_ids), 0)
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        try:
            while batch := await self.next_batch():
                for delta in batch:
                    joined.setdefault(delta.index, []).append(delta)
                    usage = delta.usage or usage
                    prompt_logprobs = delta.prompt_logprobs or prompt_logprobs
        finally:
            self.abort()
        choices = tuple(_join(deltas) for _, deltas in sorted(joined.items()))
        return RequestOutput(self.request_id, tuple(self.prompt_token_ids), choices, usage, prompt_logprobs)


def _join(deltas: list[OutputDelta]) -> ChoiceOutput:
    last = deltas[-1]
    assert last.finish_reason is not None
    with_logprobs = any(delta.logprobs is not None for delta in deltas)
    return ChoiceOutput(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if with_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
