"""A full queue, a failing step, a deadline: what the client is told, before and after the first event."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from metrale_async.api import completions
from metrale_async.engine import EngineArgs
from tests.api.server import served, until
from tests.api.test_completions import events


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_with_retry_after(stream):
    async with served(EngineArgs(max_num_seqs=3), num_blocks=1024, max_seq_len=8192, verify=False) as server:
        long = asyncio.create_task(server.post("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 5000}))
        await until(lambda: server.engine.statistics().sequences_running == 2)
        for body, status in [({"prompt": "a"}, 200), ({"prompt": "a", "n": 2}, 429), ({"prompt": ["a", "b"]}, 429)]:
            async with server.http.post("/v1/completions", json={**body, "stream": stream}) as response:
                assert response.status == status
                await response.read()
                if status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert (await response.json())["error"]["type"] == "rate_limit_error"
            assert server.engine.statistics().requests_active == 1
        async with server.openai() as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="scripted", prompt="a", n=2)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_before_the_first_event_is_a_500_with_and_without_stream(stream):
    def fault(plan, chunk):
        return RuntimeError("bad memory") if chunk.start == 0 and chunk.count == 7 else None

    async with served(fault=fault) as server:
        status, answer = await server.post("/v1/completions", {"prompt": "a" * 7, "stream": stream})
        assert status == 500
        assert answer["error"]["code"] == "step_failed"
        assert "bad memory" not in answer["error"]["message"]
        assert (await server.post("/v1/completions", {"prompt": "a"}))[0] == 200


async def test_a_fault_after_the_first_event_is_an_error_event_on_that_stream_alone():
    def fault(plan, chunk):
        return RuntimeError("bad memory") if chunk.start == 20 and plan.step > 0 and chunk.sequence_id == 0 else None

    async with served(fault=fault) as server:
        body = {"prompt": "a" * 7, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        failing, neighbour = await asyncio.gather(events(server, body), events(server, {**body, "prompt": "b" * 7}))
        assert failing[-1]["error"]["code"] == "step_failed"
        assert all("error" not in event for event in [*failing[:-1], *neighbour])
        assert neighbour[-1]["choices"][0]["finish_reason"] == "length"
        async with server.openai() as client:
            answer = await client.completions.create(model="scripted", prompt="b" * 7, max_tokens=30, temperature=0)
            assert answer.choices[0].text == "".join(event["choices"][0]["text"] for event in neighbour)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_of_the_server_tells_the_client_nothing_of_it(stream, monkeypatch, caplog):
    def fail(*args):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(completions.CompletionAnswer, "_json", fail)
    monkeypatch.setattr(completions.CompletionEventEncoder, "encode", fail)
    async with served() as server:
        status, answer = await server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert status == 500
        assert "secret" not in json.dumps(answer)
        assert answer["error"]["code"] == "internal_error"
    assert any(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_ends_with_finish_reason_timeout(stream):
    async with served(EngineArgs(request_timeout=0.05), num_blocks=1024, max_seq_len=8192, verify=False) as server:
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True}
        if stream:
            *_, last = await events(server, body)
        else:
            status, last = await server.post("/v1/completions", body)
            assert status == 200
        assert last["choices"][0]["finish_reason"] == "timeout"


async def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers():
    async with served() as server:
        status, answer = await server.post("/v1/completions", {"prompt": "a" * 1020, "max_tokens": 5})
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        assert "1025" in answer["error"]["message"]
        assert "1024" in answer["error"]["message"]
        assert (await server.post("/v1/completions", {"prompt": "a" * 1019, "max_tokens": 5}))[0] == 200
