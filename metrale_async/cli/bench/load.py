"""The load generator: streaming requests against an OpenAI-compatible server, timed event by event.

Cheap on purpose, since it runs on the cores of the server it measures: raw reads, one split and one orjson call for an
event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import aiohttp
import orjson

from metrale_async.errors import MetraleError

Endpoint = Literal["completions", "chat"]

_ERROR_TEXT_CHARS: Final = 300


class BenchmarkError(MetraleError):
    """The server under test cannot be measured: unreachable, or it refuses what the benchmark has to ask."""


class FailedRequestError(BenchmarkError):
    """One request did not end as it should; ``status`` is None if it failed after the headers."""

    def __init__(self, status: int | None, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:_ERROR_TEXT_CHARS]}" if status else text[:_ERROR_TEXT_CHARS])
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is measured, and which extensions it understands."""

    base_url: str
    """Up to and including ``/v1``."""
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    ignore_eos: bool = True
    """Every answer has the full length; a server without this extension may end early, and its tokens are counted."""
    reports_usage: bool = True
    """Token counts come in a usage chunk; without it every event with text counts as a token."""

    @property
    def url(self) -> str:
        return f"{self.base_url}/{'chat/completions' if self.endpoint == 'chat' else 'completions'}"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return headers

    def body(self, prompt: str, max_tokens: int, *, stream: bool = True) -> bytes:
        body: dict[str, Any] = {"model": self.model, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if stream and self.reports_usage:
            body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body)


@dataclass(slots=True)
class RequestTiming:
    """One streamed answer. Times are seconds of the monotonic clock."""

    started_s: float
    first_token_s: float = 0.0
    finished_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between one event with text and the next, as the client saw them."""
    events: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def as_milliseconds(self) -> dict[str, float]:
        """What a result file keeps of it: the gaps by their largest alone, since all of them are many."""
        return {
            "first_token_ms": round(1000 * (self.first_token_s - self.started_s), 2),
            "duration_ms": round(1000 * (self.finished_s - self.started_s), 2),
            "largest_gap_ms": round(1000 * max(self.gaps_s, default=0.0), 2),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Level:
    """Everything that was seen at one concurrency."""

    concurrency: int
    duration_s: float
    timings: Sequence[RequestTiming]
    failures: Sequence[str]


async def timed_request(session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int) -> RequestTiming:
    """Send one streaming request and time its events; raises FailedRequestError."""
    timing = RequestTiming(started_s=time.perf_counter())
    body = target.body(prompt, max_tokens)
    try:
        async with session.post(target.url, data=body, headers=target.headers) as response:
            if response.status != 200:
                raise FailedRequestError(response.status, await response.text())
            last_s = 0.0
            tail = b""
            async for data in response.content.iter_any():
                now_s = time.perf_counter()
                *lines, tail = (tail + data).split(b"\n")
                for event in _events(lines):
                    if not _record(timing, event):
                        continue
                    if timing.events == 0:
                        timing.first_token_s = now_s
                    else:
                        timing.gaps_s.append(now_s - last_s)
                    timing.events += 1
                    last_s = now_s
    except (aiohttp.ClientError, TimeoutError) as error:
        raise FailedRequestError(None, f"{type(error).__name__}: {error}") from error
    timing.finished_s = time.perf_counter()
    timing.completion_tokens = timing.completion_tokens or timing.events
    if timing.completion_tokens == 0:
        raise FailedRequestError(None, "the stream held no tokens")
    if timing.events == 0:  # tokens without text, as half a character is
        timing.first_token_s = timing.finished_s
    return timing


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data != b"[DONE]":
                yield orjson.loads(data)


def _record(timing: RequestTiming, event: dict[str, Any]) -> bool:
    """Take over what the event counts; True if it holds text."""
    if "error" in event:
        raise FailedRequestError(None, f"error event: {event['error']}")
    usage = event.get("usage")
    if usage:
        timing.prompt_tokens = usage.get("prompt_tokens", 0)
        timing.completion_tokens = usage.get("completion_tokens", 0)
    for choice in event.get("choices", ()):
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content"):
            return True
    return False


async def run_level(
    session: aiohttp.ClientSession, target: Target, prompts: Sequence[str], max_tokens: int, concurrency: int
) -> Level:
    """Keep ``concurrency`` requests in flight until every prompt was sent once."""
    timings: list[RequestTiming] = []
    failures: list[str] = []
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            try:
                timings.append(await timed_request(session, target, prompt, max_tokens))
            except FailedRequestError as error:
                failures.append(str(error))

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as clients:
        for _ in range(concurrency):
            clients.create_task(client())
    return Level(concurrency, time.perf_counter() - started_s, timings, failures)


async def first_model(session: aiohttp.ClientSession, base_url: str, headers: dict[str, str]) -> str:
    """The id of the first model a server lists."""
    try:
        async with session.get(f"{base_url}/models", headers=headers) as response:
            if response.status != 200:
                raise BenchmarkError(f"{base_url}/models answers {response.status}; name the model on the command line")
            listed = orjson.loads(await response.read())
    except aiohttp.ClientError as error:
        raise BenchmarkError(f"{base_url} cannot be reached: {error}") from error
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise BenchmarkError(f"{base_url}/models lists no model; name one on the command line") from error


async def probe(session: aiohttp.ClientSession, target: Target, prompt: str) -> Target:
    """``target`` less the extensions its server refuses; also the warm-up. Raises FailedRequestError."""
    attempts = [
        target,
        replace(target, ignore_eos=False),
        replace(target, reports_usage=False),
        replace(target, ignore_eos=False, reports_usage=False),
    ]
    refusal: FailedRequestError | None = None
    for attempt in attempts:
        try:
            timing = await timed_request(session, attempt, prompt, 2)
        except FailedRequestError as error:
            if error.status not in (400, 422):
                raise
            refusal = refusal or error
            continue
        return attempt if timing.prompt_tokens else replace(attempt, reports_usage=False)
    assert refusal is not None
    raise refusal


async def count_prompt_tokens(session: aiohttp.ClientSession, target: Target, prompt: str) -> int | None:
    """How many tokens the server takes ``prompt`` for; None if it does not say."""
    timing = await timed_request(session, target, prompt, 1)
    return timing.prompt_tokens or None
