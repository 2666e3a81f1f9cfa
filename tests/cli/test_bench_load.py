"""The load generator, against a small server on a real socket that behaves as servers of the field do."""

from __future__ import annotations

import asyncio
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from rich.console import Console

from metrale_async.cli.bench.ladder import LadderArgs, run_ladder
from metrale_async.cli.bench.load import (
    BenchmarkError,
    FailedRequestError,
    Level,
    RequestTiming,
    Target,
    probe,
    run_level,
    timed_request,
)
from metrale_async.cli.bench.prompts import WORDS, calibrate_words, word_prompt
from metrale_async.cli.bench.statistics import percentile_ms, summarize


@dataclass
class FakeServer:
    """Answers ``max_tokens`` tokens, one event each; counts a token per word and ``template_tokens`` on top."""

    refuses: set[str] = field(default_factory=set)
    template_tokens: int = 0
    event_separator: bytes = b"\n\n"
    split_at: int | None = None
    """Events are written in pieces of this many bytes."""
    fails: Callable[[int], str | None] = lambda index: None
    """For the n-th request: "status", "event" or "cut"."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    in_flight_max: int = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake-model"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.bodies.append(body)
        if refused := self.refuses & body.keys():
            return web.json_response({"error": {"message": f"unknown field {refused}"}}, status=400)
        failure = self.fails(len(self.bodies))
        if failure == "status":
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}] if chat else []
        for index in range(body["max_tokens"]):
            events.append({"choices": [{"delta": {"content": f" {index}"}} if chat else {"text": f" {index}"}]})
        if failure == "event":
            events.append({"error": {"message": "the step failed"}})
        if body.get("stream_options"):
            counts = {
                "prompt_tokens": len(prompt.split()) + self.template_tokens,
                "completion_tokens": body["max_tokens"],
            }
            events.append({"choices": [], "usage": counts})
        data = b"".join(b"data: " + orjson.dumps(event) + self.event_separator for event in events)
        data += b"data: [DONE]" + self.event_separator
        size = self.split_at or len(data)
        for start in range(0, len(data), size):
            if failure == "cut" and start:
                request.transport.abort()  # type: ignore[union-attr]
                break
            await response.write(data[start : start + size])
            await asyncio.sleep(0)
        self.in_flight -= 1
        return response


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def written(folder: Path, pattern: str) -> tuple[dict[str, Any], ElementTree.Element]:
    """The one result in a folder: its JSON, and its chart as XML."""
    (file,) = folder.glob(pattern + ".json")
    return orjson.loads(file.read_bytes()), ElementTree.fromstring(file.with_suffix(".svg").read_text("utf-8"))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("separator", [b"\n\n", b"\r\n\r\n"])
@pytest.mark.parametrize("split_at", [None, 1, 7, 4096])
async def test_events_are_counted_however_the_bytes_arrive(
    endpoint: Any, separator: bytes, split_at: int | None
) -> None:
    server = FakeServer(event_separator=separator, split_at=split_at)
    async with running(server) as url, aiohttp.ClientSession() as session:
        target = Target(base_url=url, model="m", endpoint=endpoint)
        timing = await timed_request(session, target, "one two three", 5)
    assert (timing.prompt_tokens, timing.completion_tokens, timing.events, len(timing.gaps_s)) == (3, 5, 5, 4)
    assert timing.started_s < timing.first_token_s <= timing.finished_s
    assert timing.first_token_s + sum(timing.gaps_s) == pytest.approx(timing.finished_s, abs=1.0)
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["temperature"] == 0


async def test_a_server_without_extensions_is_asked_without_them() -> None:
    server = FakeServer(refuses={"ignore_eos", "stream_options"})
    async with running(server) as url, aiohttp.ClientSession() as session:
        target = await probe(session, Target(base_url=url, model="m"), "hello")
        timing = await timed_request(session, target, "hello", 4)
    assert (target.ignore_eos, target.reports_usage) == (False, False)
    assert timing.completion_tokens == 4


async def test_a_server_that_refuses_everything_is_reported_with_its_words() -> None:
    server = FakeServer(refuses={"max_tokens"})
    async with running(server) as url, aiohttp.ClientSession() as session:
        with pytest.raises(FailedRequestError, match=r"HTTP 400.*max_tokens"):
            await probe(session, Target(base_url=url, model="m"), "hello")


@pytest.mark.parametrize(
    ("failure", "words"), [("status", "HTTP 429"), ("event", "the step failed"), ("cut", "ClientPayloadError")]
)
async def test_a_failed_request_is_told_and_the_others_count(failure: str, words: str) -> None:
    server = FakeServer(fails=lambda index: failure if index == 2 else None, split_at=64)
    async with running(server) as url, aiohttp.ClientSession() as session:
        level = await run_level(session, Target(base_url=url, model="m"), ["a", "b", "c", "d"], 3, 1)
    assert len(level.timings) == 3
    assert len(level.failures) == 1
    assert words in level.failures[0]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
async def test_a_level_keeps_as_many_requests_in_flight_as_asked(concurrency: int) -> None:
    server = FakeServer(split_at=16)
    async with running(server) as url, aiohttp.ClientSession() as session:
        prompts = [word_prompt(4, seed) for seed in range(2 * concurrency)]
        level = await run_level(session, Target(base_url=url, model="m"), prompts, 20, concurrency)
    assert server.in_flight_max == concurrency
    assert sorted(body["prompt"] for body in server.bodies) == sorted(prompts)
    assert summarize(level).completion_tokens == 2 * concurrency * 20


@pytest.mark.parametrize("template_tokens", [0, 1, 31])
async def test_prompts_are_made_as_long_as_wanted_by_the_servers_count(template_tokens: int) -> None:
    async def count(prompt: str) -> int:
        return len(prompt.split()) + template_tokens

    words, tokens = await calibrate_words(128, count, 0)
    assert (words, tokens) == (128 - template_tokens, 128)


async def test_without_counts_a_word_is_taken_for_a_token() -> None:
    async def count(prompt: str) -> None:
        return None

    assert await calibrate_words(128, count, 0) == (128, None)


def test_prompts_of_different_seeds_share_no_long_prefix() -> None:
    prompts = [word_prompt(128, seed).split() for seed in range(100)]
    assert len({tuple(prompt[:4]) for prompt in prompts}) == 100
    assert set().union(*prompts) <= set(WORDS)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile_ms([], 0.5) is None
    assert percentile_ms([0.003], 0.99) == pytest.approx(3)
    assert percentile_ms([0.004, 0.001, 0.002, 0.003], 0.5) == pytest.approx(2.5)
    assert percentile_ms([i / 1000 for i in range(101)], 0.99) == pytest.approx(99)


def test_a_summary_counts_tokens_over_the_time_of_the_level() -> None:
    timing = RequestTiming(1.0, 1.5, 2.5, [0.25, 0.75], events=3, prompt_tokens=7, completion_tokens=5)
    row = summarize(Level(4, 2.0, [timing, timing], ["HTTP 500"]))
    assert (row.requests, row.failed, row.completion_tokens, row.output_tokens_per_s) == (3, 1, 10, 5.0)
    assert (row.ttft_p50_ms, row.inter_token_p50_ms, row.time_per_output_token_ms) == (500, 500, 250)


async def test_the_ladder_writes_table_json_and_chart(tmp_path: Path) -> None:
    server = FakeServer(template_tokens=3)
    console = Console(record=True, width=140, quiet=True)
    async with running(server) as url:
        args = LadderArgs(url=url, concurrency="1,4,9", output_tokens=6, output_dir=str(tmp_path), label="fake & co")
        assert await run_ladder(args, console) == 0
    content, picture = written(tmp_path, "ladder-fake-co-*")
    assert [row["concurrency"] for row in content["levels"]] == [1, 4, 9]
    assert [row["requests"] for row in content["levels"]] == [8, 8, 18]
    assert all(row["prompt_tokens_mean"] == 128 for row in content["levels"])
    assert all(row["completion_tokens"] == 6 * row["requests"] for row in content["levels"])
    assert [len(content["requests"][level]) for level in ("1", "4", "9")] == [8, 8, 18]
    assert content["machine"]["usable_cores"] >= 1
    assert content["target"] == {"url": f"{url}/completions", "ignore_eos": True, "reports_usage": True}
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 5


async def test_the_ladder_ends_with_code_1_when_a_request_failed(tmp_path: Path) -> None:
    server = FakeServer(fails=lambda index: "status" if index == 5 else None)
    console = Console(quiet=True)
    async with running(server) as url:
        args = LadderArgs(url=url, model="m", concurrency="2", output_tokens=2, output_dir=str(tmp_path))
        assert await run_ladder(args, console) == 1


async def test_a_server_that_is_not_there_is_reported_by_address(tmp_path: Path) -> None:
    args = LadderArgs(url="http://127.0.0.1:1/v1", output_dir=str(tmp_path))
    with pytest.raises(BenchmarkError, match="cannot be reached"):
        await run_ladder(args, Console(quiet=True))
