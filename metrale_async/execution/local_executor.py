"""Runs steps on this process's device, through one stream thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch

from metrale_async.execution.model_runner import ModelRunner
from metrale_async.execution.plan import Chunk, SamplerSpec, SequenceStart, StepPlan, StepResult
from metrale_async.execution.stream_thread import StreamThread

_NEUTRAL = SamplerSpec(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias={},
    seed=0,
    choice=0,
    logprobs=None,
    prompt_logprobs=None,
    min_tokens=0,
    suppressed_token_ids=(),
)


class LocalExecutor:
    """A model runner behind a stream thread."""

    def __init__(
        self, runner: ModelRunner, device: torch.device, *, prepare_thread: Callable[[], None] = lambda: None
    ) -> None:
        """``prepare_thread`` runs once in the stream thread before the first step (thread-local settings)."""
        self._runner = runner
        self._thread = StreamThread("metrale-compute", device)
        self._prepare_thread = prepare_thread

    async def start(self) -> None:
        """Start the thread and run one small step, so that the first request finds everything loaded and compiled.

        The step writes into block 0 and slot 0, which whoever gets them next overwrites.
        """
        self._thread.start()
        await self._thread.submit(lambda: self._prepare_thread)
        start = SequenceStart(
            slot=0,
            sequence_id=-1,
            token_ids=(0,),
            prompt_length=1,
            blocks=(),
            copies=(),
            snapshot=None,
            sampler=_NEUTRAL,
        )
        chunk = Chunk(slot=0, sequence_id=-1, start=0, count=1, new_blocks=(0,), samples=True)
        result = await self.submit(
            StepPlan(step=-1, starts=(start,), chunks=(chunk,), prefill_tokens=1, decode_tokens=0)
        )
        error = result.chunks[0].error
        if error is not None:
            raise error

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        return self._thread.submit(lambda: self._runner.launch(plan))

    async def close(self) -> None:
        await self._thread.close()
