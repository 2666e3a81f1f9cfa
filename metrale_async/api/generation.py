"""One HTTP request's generations in the engine: submitted together, read together, ended together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from metrale_async.api.limits import MAX_NAME_CHARS
from metrale_async.api.request_log import LOGGED_PROMPT_CHARS, RequestSummary
from metrale_async.engine import AsyncEngine, GenerationStream, OutputDelta, RequestOutput, SamplingParams, Usage
from metrale_async.errors import InvalidRequestError

OnBatch = Callable[[int, list[OutputDelta]], Awaitable[None]]
"""Called with a prompt's index and what is new of its choices."""


@contextlib.contextmanager
def submitted(
    engine: AsyncEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, name: str, cache_salt: str | None
) -> Iterator[list[GenerationStream]]:
    """All prompts in the engine, or none; leaving ends them. Raises what ``AsyncEngine.submit`` raises."""
    salt = cache_salt or ""
    if len(salt) > MAX_NAME_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(salt)} characters; allowed: up to {MAX_NAME_CHARS}", param="cache_salt"
        )
    streams: list[GenerationStream] = []
    try:
        for index, prompt in enumerate(prompts):
            streams.append(engine.submit(prompt, params, request_id=f"{name}-{index}", cache_salt=salt))
        yield streams
    finally:
        for stream in streams:
            stream.abort()


async def read_streams(streams: Sequence[GenerationStream], on_batch: OnBatch) -> None:
    """Read every stream to its end; ``on_batch`` is never called twice at a time. Raises the first error."""
    if len(streams) == 1:
        while batch := await streams[0].next_batch():
            await on_batch(0, batch)
        return
    taking_turns = asyncio.Lock()

    async def read(index: int, stream: GenerationStream) -> None:
        while batch := await stream.next_batch():
            async with taking_turns:
                await on_batch(index, batch)

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
    summary: RequestSummary, engine: AsyncEngine, prompts: Sequence[Sequence[int]], n: int, *, log_prompts: bool
) -> None:
    """What the log line tells of the work that was asked for."""
    summary.prompt_tokens = sum(map(len, prompts))
    summary.choices = len(prompts) * n
    if log_prompts and prompts:
        summary.prompt = engine.tokenizer.decode(prompts[0][:LOGGED_PROMPT_CHARS], skip_special_tokens=False)[
            :LOGGED_PROMPT_CHARS
        ]


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
