"""What an operator sees: /metrics and one line for every finished request."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from metrale_async.api import ServerArgs
from metrale_async.api.loop_lag import measure_loop_lag
from tests.api.server import Server, served, until
from tests.support.virtual_time import run_on_virtual_time


async def samples(server: Server) -> dict[str, float]:
    async with server.http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        families = text_string_to_metric_families(await response.text())
        return {
            sample.name + "".join(f"|{value}" for value in sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


async def test_metrics_count_what_was_done():
    async with served() as server:
        body = {"prompt": "abcd", "max_tokens": 6, "ignore_eos": True, "n": 2, "temperature": 0}
        await server.post("/v1/completions", body)
        await server.post("/v1/completions", {"prompt": "a", "temperature": 9})
        found = await samples(server)
        assert found["metrale_ready"] == 1
        assert found["metrale_requests_total"] == 1
        assert found["metrale_generated_tokens_total"] == 12
        assert found["metrale_choices_finished_total|length"] == 2
        assert found["metrale_time_to_first_token_seconds_count"] == 1
        assert found["metrale_inter_token_seconds_count"] == 10
        assert found["metrale_request_duration_seconds_count"] == 1
        assert found["metrale_queue_seconds_count"] == 1
        assert found["metrale_step_seconds_count"] == found["metrale_steps_total"] > 0
        assert found["metrale_kv_blocks_used"] == 0
        assert found["metrale_kv_blocks_capacity"] == 256
        assert found["metrale_http_responses_total|/v1/completions|200"] == 1
        assert found["metrale_http_responses_total|/v1/completions|400"] == 1
        assert {"metrale_sequences_running", "metrale_sequences_waiting", "metrale_preemptions_total"} <= found.keys()
        assert "metrale_loop_lag_seconds_count" in found


async def test_gauges_show_what_runs():
    async with served(num_blocks=1024, max_seq_len=8192, max_batch_size=2, verify=False) as server:
        body = {"prompt": "a", "n": 3, "max_tokens": 8000, "ignore_eos": True, "stream": True}
        async with server.http.post("/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            found = await samples(server)
            assert found["metrale_requests_active"] == 1
            assert found["metrale_sequences_running"] == 2
            assert found["metrale_sequences_waiting"] == 1
            assert found["metrale_kv_blocks_used"] > 0
            response.close()


async def test_two_servers_in_one_process_do_not_share_numbers():
    async with served() as one, served() as other:
        await one.post("/v1/completions", {"prompt": "a"})
        assert await one.metric("metrale_requests_total") == 1
        assert await other.metric("metrale_requests_total") == 0


def test_loop_lag_is_what_a_timer_is_late():
    async def main() -> list[float]:
        seen: list[float] = []
        measuring = asyncio.create_task(measure_loop_lag(seen.append, 1.0, asyncio.get_running_loop().time))
        await asyncio.sleep(3.5)
        measuring.cancel()
        await asyncio.gather(measuring, return_exceptions=True)
        return seen

    assert run_on_virtual_time(main()) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_request_is_one_line_without_its_text(log, stream):
    out = log("json")
    async with served() as server:
        body = {"prompt": "a secret", "max_tokens": 5, "temperature": 0, "stream": stream, "surprise": 1}
        async with server.http.post("/v1/completions", json=body, headers={"X-Request-Id": "my-id"}) as response:
            await response.read()
        await server.get("/health")
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert line["request_id"] == "my-id"
    assert line["path"] == "/v1/completions"
    assert line["status"] == 200
    assert (line["prompt_tokens"], line["completion_tokens"], line["choices"]) == (8, 5, 1)
    assert line["finish_reasons"] == "length"
    assert line["ignored_fields"] == "surprise"
    assert line["stream"] is stream
    assert ("first_token_ms" in line) == stream
    assert "secret" not in out.getvalue()


async def test_the_prompt_is_logged_only_when_asked_for(log):
    out = log("json")
    async with served(server_args=ServerArgs(log_prompts=True)) as server:
        await server.post("/v1/completions", {"prompt": "a secret\nof two lines"})
    assert json.loads(out.getvalue())["prompt"] == "a secret\nof two lines"


async def test_a_client_that_leaves_is_a_line_too(log):
    out = log("json")
    async with served(num_blocks=1024, max_seq_len=8192, verify=False) as server:
        body = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        async with server.http.post("/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await until(out.getvalue)
    assert json.loads(out.getvalue())["status"] == 499


async def test_a_client_cannot_forge_a_line(log):
    out = log("text")
    async with served() as server:
        await server.post("/v1/completions", {"prompt": "a", "x\nforged level=error\u2028": 1})
        async with server.http.post("/v1/a%0Aforged") as response:
            assert response.status == 404
    assert len(out.getvalue().splitlines()) == 2
    assert "\\nforged" in out.getvalue()


def test_text_lines_hold_fields_and_json_lines_hold_tracebacks(log):
    out = log("text", "warning")
    logger = logging.getLogger("metrale_async.test")
    logger.info("not shown")
    logger.warning("shown", extra={"fields": {"blocks": 3}})
    assert out.getvalue().endswith(" warning shown blocks=3\n")
    out = log("json", "error")
    out.truncate(0)
    out.seek(0)
    logger.warning("not shown")
    try:
        raise ValueError("wrong")
    except ValueError:
        logger.exception("failed")
    line = json.loads(out.getvalue())
    assert line["message"] == "failed"
    assert "ValueError: wrong" in line["exception"]
