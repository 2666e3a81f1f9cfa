"""A server process with a real model, as its users meet it: the official client, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI

from metrale_async import AsyncEngine, SamplingParams
from metrale_async.cli.bench.server_process import ServerProcess, server_process

ROOT = Path(__file__).parent.parent.parent
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(autouse=True)
def _import_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process finds the packages of this tree."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "storage"))))


@pytest.fixture
async def server(tiny_model: Path) -> AsyncIterator[ServerProcess]:
    async with server_process(str(tiny_model), ["--kv-cache-gb", "0.05", "--served-model-name", "tiny"]) as running:
        yield running


def client_of(server: ServerProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key="unused", max_retries=0)


async def test_http_gives_the_tokens_of_the_engine_streamed_or_not(server: ServerProcess, tiny_model: Path) -> None:
    """Equal token ids in this process and over HTTP, whole and streamed, beside eight neighbours."""
    async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05) as engine:
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=11, n=2)
        output = await engine.complete("Once upon a time", params)
    expected = {choice.index: list(choice.token_ids) for choice in output.choices}
    body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0, "seed": 11, "n": 2}
    async with client_of(server) as client:
        neighbours = [
            asyncio.create_task(client.completions.create(model="tiny", prompt="x" * size, max_tokens=40))
            for size in range(1, 200, 25)
        ]
        extra = {"return_token_ids": True}
        whole = await client.completions.create(model="tiny", extra_body=extra, **body)
        streamed: dict[int, list[int]] = {0: [], 1: []}
        async for chunk in await client.completions.create(model="tiny", stream=True, extra_body=extra, **body):
            for choice in chunk.choices:
                streamed[choice.index] += (choice.model_extra or {}).get("token_ids") or []
        await asyncio.gather(*neighbours)
    assert {choice.index: choice.model_extra["token_ids"] for choice in whole.choices} == expected
    assert streamed == expected
    assert [choice.text for choice in whole.choices] == [choice.text for choice in output.choices]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_the_running_request_finish_and_the_process_exits_with_0(
    tiny_model: Path, number: int
) -> None:
    command = [sys.executable, "-m", "metrale_async", "serve", str(tiny_model), "--port", "0", "--kv-cache-gb", "0.05"]
    process = await asyncio.create_subprocess_exec(*command, "--log-format", "json", stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout is not None
        greeting = await process.stdout.readuntil(b"/v1/chat/completions")
        origin = greeting[greeting.rindex(b"http://") :].decode().removesuffix("/v1/chat/completions")
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as http, http.post(f"{origin}/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            process.send_signal(number)
            text = await response.text()
        _, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0
    assert '"finish_reason":"length"' in text
    assert text.endswith("data: [DONE]\n\n")
    lines = [json.loads(line) for line in log.splitlines()]
    (request,) = [line for line in lines if line["message"] == "request"]
    assert (request["status"], request["completion_tokens"]) == (200, 300)
    assert lines[-1]["message"] == "stopped"


async def test_the_default_model_answers_the_official_client(smollm2_gguf: Path) -> None:
    async with server_process(str(smollm2_gguf), ["--kv-cache-gb", "0.1"]) as server, client_of(server) as client:
        model = (await client.models.list()).data[0].id
        request = {"model": model, "messages": MESSAGES, "max_tokens": 32, "temperature": 0}
        whole = await client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
        assert "Paris" in whole.choices[0].message.content
        assert whole.usage.completion_tokens <= 32
        for entry in whole.choices[0].logprobs.content:
            assert entry.logprob <= 0
            assert entry.logprob == entry.top_logprobs[0].logprob
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
