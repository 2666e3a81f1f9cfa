"""One HTTP request's generations in the engine: submitted together, read together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from metrale_async.api.limits import (
    MAX_BACKLOG_VALUES,
    MAX_INLINE_LOGPROBS,
    MAX_NAME_CHARS,
    MAX_PROMPT_LOGPROBS,
)
from metrale_async.api.request_log import LOGGED_PROMPT_CHARS, RequestSummary
from metrale_async.api.sending import ClientLeftError
from metrale_async.engine import AsyncEngine, GenerationStream, OutputDelta, RequestOutput, SamplingParams, Usage
from metrale_async.errors import InvalidRequestError, RequestTooLongError

OnBatch = Callable[[int, list[OutputDelta]], Awaitable[None]]
"""Called with a prompt's index and what is new of its choices."""

_LEAST_BACKLOG: Final = 256
"""Deltas that every stream of a request may be behind, however many streams there are."""
TOKENS_LIKE_A_LOGPROB: Final = 16
"""Tokens whose text is written in the time that one log-probability takes."""
_TOKENS_AT_ONCE: Final = 50_000
"""Prompt tokens that are submitted before others have their turn: some 3 ms."""
_TOKENS_LIKE_A_CHOICE: Final = 500
"""Tokens that are submitted in the time that one choice takes by itself."""


def check_prompts(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, repeats: int = 1
) -> None:
    """Refuse what would take long to look at, before anything is done with it. ``repeats`` is how often the prompts'
    log-probabilities are told. Raises InvalidRequestError."""
    for prompt in prompts:
        if len(prompt) >= engine.max_seq_len:
            raise RequestTooLongError(
                f"{len(prompt)} prompt tokens and at least 1 to generate; "
                f"the model's context (--max-seq-len) holds {engine.max_seq_len}",
                param="prompt",
            )
    if params.prompt_logprobs is None:
        return
    values = sum(map(len, prompts)) * (1 + params.prompt_logprobs) * repeats
    if values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{values} log-probabilities of prompts are asked for; allowed: up to {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


@contextlib.asynccontextmanager
async def submitted(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str, cache_salt: str | None
) -> AsyncIterator[list[GenerationStream]]:
    """All prompts in the engine, or none; leaving ends them. Raises what ``AsyncEngine.submit`` raises."""
    salt = cache_salt or ""
    if len(salt) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters; allowed: up to {MAX_NAME_CHARS}", param="cache_salt"
        )
    streams: list[GenerationStream] = []
    try:
        tokens = 0
        for index, prompt in enumerate(prompts):
            if tokens > _TOKENS_AT_ONCE:
                tokens = 0
                await asyncio.sleep(0)
            tokens += len(prompt) + params.n * _TOKENS_LIKE_A_CHOICE
            streams.append(engine.submit(prompt, params, request_id=f"{name}-{index}", cache_salt=salt))
        yield streams
    finally:
        for stream in streams:
            stream.abort()


async def read_streams(streams: Sequence[GenerationStream], on_batch: OnBatch, values_per_delta: int) -> None:
    """Read every stream to its end; ``on_batch`` is never called twice at a time, nor with more than it can do while
    others wait. ``values_per_delta`` is one for the token and one for each of its log-probabilities.

    Raises the first error, and ClientLeftError if more than MAX_BACKLOG_VALUES wait because sending is slow.
    """
    at_once = max(1, MAX_INLINE_LOGPROBS // values_per_delta)
    backlog = max(_LEAST_BACKLOG, MAX_BACKLOG_VALUES // values_per_delta // len(streams))
    taking_turns = asyncio.Lock()

    async def read(index: int, stream: GenerationStream) -> None:
        while batch := await stream.next_batch():
            if len(batch) > backlog:
                raise ClientLeftError(f"the client reads too slowly: it is {len(batch)} tokens behind")
            async with taking_turns:
                if len(batch) <= at_once:
                    await on_batch(index, batch)
                    continue
                for start in range(0, len(batch), at_once):
                    await on_batch(index, batch[start : start + at_once])
                    await asyncio.sleep(0)

    if len(streams) == 1:
        await read(0, streams[0])
    else:
        await _together([read(index, stream) for index, stream in enumerate(streams)])


async def collect(streams: Sequence[GenerationStream]) -> list[RequestOutput]:
    """The whole answers, in the order of the prompts. Raises the first error."""
    outputs: dict[int, RequestOutput] = {}

    async def read(index: int, stream: GenerationStream) -> None:
        outputs[index] = await stream.collect()

    if len(streams) == 1:
        await read(0, streams[0])
    else:
        await _together([read(index, stream) for index, stream in enumerate(streams)])
    return [outputs[index] for index in range(len(streams))]


async def _together(readers: Sequence[Awaitable[None]]) -> None:
    async def run(reader: Awaitable[None]) -> None:
        await reader

    try:
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(run(reader))
    except BaseExceptionGroup as errors:
        # Which one is told to the client makes no difference: all streams end with it.
        raise _first(errors) from errors


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def note_request(
    summary: RequestSummary,
    engine: AsyncEngine,
    response_id: str,
    prompts: Sequence[Sequence[int]],
    n: int,
    *,
    log_prompts: bool,
) -> None:
    """What the log line tells of the work that was asked for."""
    summary.response_id = response_id
    summary.prompt_tokens = sum(map(len, prompts))
    summary.choices = len(prompts) * n
    if log_prompts and prompts:
        summary.prompt = engine.tokenizer.decode(prompts[0][:LOGGED_PROMPT_CHARS], skip_special_tokens=False)[
            :LOGGED_PROMPT_CHARS
        ]


def cost_of_answer(params: SamplingParams, outputs: Sequence[RequestOutput], echoed_tokens: int = 0) -> int:
    """How long a whole answer takes to put together, in log-probabilities or what takes as long."""
    tokens = sum(len(choice.token_ids) for output in outputs for choice in output.choices)
    of_prompts = sum(len(output.prompt_logprobs or ()) * len(output.choices) for output in outputs)
    cost = (tokens + echoed_tokens) // TOKENS_LIKE_A_LOGPROB
    if params.logprobs is not None:
        cost += tokens * (1 + params.logprobs)
    if params.prompt_logprobs is not None:
        cost += of_prompts * (1 + params.prompt_logprobs)
    return cost


def usage_object(usages: Sequence[Usage]) -> dict[str, object]:
    """OpenAI's usage, over all prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
