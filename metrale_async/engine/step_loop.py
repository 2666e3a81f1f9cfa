"""The step cycle: plan, submit, await, commit, emit. The one task that every request's progress comes from.

Two steps are in flight at a time: while the device runs step n, step n + 1 is already queued behind it, so the device
never waits for this loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from metrale_async.engine.observer import EngineObserver, RequestRecord, StepRecord
from metrale_async.engine.outputs import FinishReason, OutputDelta
from metrale_async.engine.prefill_budget import PrefillBudget
from metrale_async.engine.request import Choice, Request
from metrale_async.engine.scheduler import Emission, Scheduler
from metrale_async.engine.statistics import EngineStatistics
from metrale_async.errors import EngineError, StepError
from metrale_async.execution import Executor, StepPlan, StepResult

MAX_STEPS_IN_FLIGHT: Final = 2

logger = logging.getLogger(__name__)


class StepLoop:
    """Owns every accepted request from :meth:`add` to its end."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        budget: PrefillBudget,
        clock: Callable[[], float],
        observer: EngineObserver | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._budget = budget
        self._clock = clock
        self._observer = observer
        self._requests: dict[str, Request] = {}
        self._choices: dict[int, tuple[Request, Choice]] = {}
        self._deadlines: deque[Request] = deque()
        """By arrival; every request has the same time limit, so also by deadline."""
        self._in_flight: deque[tuple[StepPlan, asyncio.Future[StepResult], float]] = deque()
        self._work_arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_step_ended_at_s = float("-inf")
        self._steps = 0
        self._step_failures = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._requests_total = 0
        self._aborted = 0

    # Requests

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences, waiting and running."""
        return len(self._choices)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests_total += 1
        self._deadlines.append(request)
        for choice in request.choices:
            self._choices[choice.sequence.sequence_id] = (request, choice)
            self._scheduler.add(choice.sequence)
        self._idle.clear()
        self._work_arrived.set()

    def abort(self, request_id: str) -> None:
        """The client is gone: free everything now. Harmless for a request that has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._aborted += 1
            self._drop(request, "abort")

    def fail_all(self, error: EngineError) -> None:
        """End every request with ``error``."""
        for request in list(self._requests.values()):
            self._fail(request, error)

    async def wait_idle(self) -> None:
        """Until no request is left."""
        await self._idle.wait()

    def statistics(self) -> EngineStatistics:
        return EngineStatistics(
            requests_active=len(self._requests),
            sequences_waiting=self._scheduler.num_waiting,
            sequences_running=self._scheduler.num_running,
            steps_in_flight=len(self._in_flight),
            kv_blocks=self._scheduler.pool.statistics(),
            prefix_cache=self._scheduler.cache.statistics(),
            steps_total=self._steps,
            step_failures_total=self._step_failures,
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated_tokens,
            preemptions_total=self._scheduler.preemptions_total,
            requests_total=self._requests_total,
            requests_aborted_total=self._aborted,
        )

    def check(self) -> None:
        """Integrity of everything the engine owns. Raises AssertionError when wrong."""
        self._scheduler.check()
        unfinished = {
            choice.sequence.sequence_id
            for request in self._requests.values()
            for choice in request.choices
            if choice.finish_reason is None
        }
        assert unfinished == set(self._choices), "choices and requests disagree"
        assert len(self._choices) == self._scheduler.num_waiting + self._scheduler.num_running, "a sequence is lost"

    # The cycle

    async def run(self) -> None:
        """Step until cancelled. Raises only if the executor as a whole is broken; every request has then failed."""
        try:
            while True:
                self._end_overdue()
                self._submit_steps()
                if self._in_flight:
                    await self._finish_oldest_step()
                else:
                    self._work_arrived.clear()
                    await self._work_arrived.wait()
        except Exception as error:
            logger.exception("the executor failed; all running requests fail with it")
            self._step_failures += 1
            self.fail_all(StepError(f"the device failed: {type(error).__name__}"))
            raise
        finally:
            for _, pending, _ in self._in_flight:
                pending.cancel()

    def _submit_steps(self) -> None:
        while len(self._in_flight) < MAX_STEPS_IN_FLIGHT:
            now_s = self._clock()
            budget = self._budget.tokens(streams_are_running=self._scheduler.has_running_decode)
            plan = self._scheduler.plan(now_s, budget)
            if plan is None:
                return
            self._in_flight.append((plan, self._executor.submit(plan), now_s))

    async def _finish_oldest_step(self) -> None:
        plan, pending, submitted_at_s = self._in_flight[0]
        result = await pending
        self._in_flight.popleft()
        now_s = self._clock()
        emissions = self._scheduler.commit(plan, result)
        # A step queued behind another one only starts when that one ends.
        started_at_s = max(submitted_at_s, self._last_step_ended_at_s)
        self._last_step_ended_at_s = now_s
        duration_s = now_s - started_at_s
        self._budget.observe(
            duration_s=duration_s, prefill_tokens=plan.prefill_tokens, decode_tokens=plan.decode_tokens
        )
        self._steps += 1
        self._prompt_tokens += plan.prefill_tokens
        inter_token_s = [gap for emission in emissions if (gap := self._emit(emission, now_s)) is not None]
        if self._observer is not None:
            self._observer.step_finished(
                StepRecord(duration_s, plan.prefill_tokens, plan.decode_tokens, len(plan.chunks), tuple(inter_token_s))
            )

    # One emission

    def _emit(self, emission: Emission, now_s: float) -> float | None:
        """Hand one sequence's result to its client; returns the seconds since its previous token."""
        entry = self._choices.get(emission.sequence.sequence_id)
        if entry is None:
            return None
        request, choice = entry
        result = emission.result
        if result.error is not None:
            self._step_failures += 1
            logger.error("a step failed under request %s", request.request_id, exc_info=result.error)
            self._fail(request, StepError(f"the step failed under this request: {type(result.error).__name__}"))
            return None
        request.take_prompt_logprobs(emission.chunk, result)
        if result.token_id is None:
            return None
        self._generated_tokens += 1
        if request.first_token_at_s is None:
            request.first_token_at_s = now_s
        gap_s = None if choice.last_token_at_s is None else now_s - choice.last_token_at_s
        choice.last_token_at_s = now_s
        text, finish_reason, stop_reason = choice.advance(
            result.token_id, ended=emission.ended, end_token_id=emission.end_token_id
        )
        self._send(request, choice, text, emission, finish_reason, stop_reason)
        return gap_s

    def _send(
        self,
        request: Request,
        choice: Choice,
        text: str,
        emission: Emission | None,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> None:
        token_ids: tuple[int, ...] = ()
        logprobs = None
        if emission is not None and emission.result.token_id is not None:
            token_ids = (emission.result.token_id,)
            logprobs = None if emission.result.logprobs is None else (emission.result.logprobs,)
        if finish_reason is not None:
            choice.finish_reason = finish_reason
            self._scheduler.finish(choice.sequence)
            del self._choices[choice.sequence.sequence_id]
        is_last = finish_reason is not None and request.unfinished_choices == 0
        request.channel.push(
            OutputDelta(
                request_id=request.request_id,
                index=choice.index,
                text=text,
                token_ids=token_ids,
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                prompt_logprobs=request.pop_prompt_logprobs() if choice.index == 0 else None,
                usage=request.usage if is_last else None,
            )
        )
        if is_last:
            self._close(request)
            request.channel.end()

    # A request's end

    def _end_overdue(self) -> None:
        now_s = self._clock()
        while self._deadlines and (self._deadlines[0].ended or self._deadlines[0].deadline_s <= now_s):
            request = self._deadlines.popleft()
            if request.ended:
                continue
            for choice in request.choices:
                if choice.finish_reason is None:
                    self._send(request, choice, choice.rest(), None, "timeout", None)

    def _fail(self, request: Request, error: EngineError) -> None:
        self._drop(request, "error")
        request.channel.end(error)

    def _drop(self, request: Request, reason: str) -> None:
        for choice in request.choices:
            if choice.finish_reason is None:
                choice.finish_reason = reason
                self._scheduler.finish(choice.sequence)
                del self._choices[choice.sequence.sequence_id]
        self._close(request)

    def _close(self, request: Request) -> None:
        request.ended = True
        del self._requests[request.request_id]
        if not self._requests:
            self._idle.set()
            self._deadlines.clear()
        if self._observer is None:
            return
        starts_s = [choice.sequence.first_planned_at_s for choice in request.choices]
        first_start_s = min((start for start in starts_s if start is not None), default=None)
        arrived_s = request.arrived_at_s
        self._observer.request_finished(
            RequestRecord(
                request_id=request.request_id,
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=request.usage.completion_tokens,
                cached_tokens=request.usage.cached_tokens,
                choices=len(request.choices),
                finish_reasons=tuple(choice.finish_reason or "error" for choice in request.choices),
                queue_s=None if first_start_s is None else first_start_s - arrived_s,
                time_to_first_token_s=None
                if request.first_token_at_s is None
                else request.first_token_at_s - arrived_s,
                total_s=self._clock() - arrived_s,
                preemptions=sum(choice.sequence.preemptions for choice in request.choices),
            )
        )
