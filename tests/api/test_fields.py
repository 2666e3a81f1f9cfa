"""What becomes of the fields of a request, as docs/http.md tells it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from pathlib import Path

import pytest

from metrale_async.api import Metrics, completions, json_body
from metrale_async.api.fields import LABELS, NEUTRAL_VALUES
from metrale_async.api.limits import MAX_ECHOED_CHARS, MAX_NAME_CHARS, MAX_PROMPT_LOGPROBS
from metrale_async.api.schemas import ChatCompletionRequest, CompletionRequest, GenerationFields
from tests.api.server import served
from tests.api.test_completions import events

PAGE = (Path(__file__).parent.parent.parent / "docs" / "http.md").read_text("utf-8")
MESSAGES = [{"role": "user", "content": "hello"}]
LONG = {"num_blocks": 4096, "max_seq_len": 65536, "verify": False}


def paragraph(start: str) -> set[str]:
    """The field names in the paragraph that begins with ``start``."""
    (found,) = (block for block in PAGE.split("\n\n") if block.startswith(start))
    return set(re.findall(r"`([a-z_]+)`", found))


def test_the_page_names_every_field_that_is_honoured():
    common = set(GenerationFields.__struct_fields__)
    assert paragraph("**Honoured**") == common
    assert paragraph("Chat only:") - common == set(ChatCompletionRequest.__struct_fields__) - common
    assert paragraph("Text only:") - common == set(CompletionRequest.__struct_fields__) - common


def test_the_page_names_every_label():
    assert paragraph("**Labels**") == LABELS


def test_the_page_names_every_refused_field_and_what_is_accepted_of_it():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert rows == {
        name: " or ".join(f"`{json.dumps(value)}`" for value in values) or "nothing"
        for name, values in NEUTRAL_VALUES.items()
    }


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
async def test_a_refused_field_is_accepted_with_neutral_values_only(name):
    async with served() as server:
        for path, body in [
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ]:
            honoured = name in CompletionRequest.__struct_fields__ and "prompt" in body
            for value in (None, *NEUTRAL_VALUES[name]):
                status, answer = await server.post(path, {**body, name: value})
                assert status == 200, answer
            status, answer = await server.post(path, {**body, name: {"asks": "for something"}})
            assert (status, answer["error"]["param"]) == (400, name)
            assert answer["error"]["code"] == ("invalid_type" if honoured else "unsupported_parameter")


@pytest.mark.parametrize("name", sorted(LABELS))
async def test_a_label_changes_nothing(name):
    async with served() as server:
        body = {"prompt": "a", "seed": 1}
        _, plain = await server.post("/v1/completions", body)
        status, labelled = await server.post("/v1/completions", {**body, name: {"any": ["value"]}})
        assert status == 200
        assert labelled["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("both", "status"), [((5, 5), 200), ((5, None), 200), ((None, 5), 200), ((5, 6), 400), ((6, 5), 400)]
)
async def test_two_names_of_one_limit_must_agree(both, status):
    async with served() as server:
        body = {"messages": MESSAGES, "max_tokens": both[0], "max_completion_tokens": both[1], "ignore_eos": True}
        got, answer = await server.post("/v1/chat/completions", body)
        assert got == status
        if status == 200:
            assert answer["usage"]["completion_tokens"] == 5
        else:
            assert answer["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", {"prompt": ["ab", "cde"]}), ("/v1/chat/completions", {"messages": MESSAGES})],
)
async def test_usage_in_every_event_grows_up_to_the_last(path, fields):
    async with served() as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {**fields, "max_tokens": 6, "n": 2, "seed": 1, "ignore_eos": True, "stream_options": options}
        *found, last = await events(server, body, path)
        assert all(event["choices"] for event in found)
        assert last["choices"] == []
        usages = [event["usage"] for event in found]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[0] <= 1
        assert usages[-1] == last["usage"]
        assert last["usage"]["completion_tokens"] == 6 * 2 * len(fields.get("prompt", [0]))
        assert len({usage["prompt_tokens"] for usage in usages}) == 1


async def test_usage_in_every_event_needs_usage_at_all():
    async with served() as server:
        for options in ({"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}):
            body = {"prompt": "a", "stream": True, "stream_options": options}
            status, answer = await server.post("/v1/completions", body)
            assert (status, answer["error"]["param"]) == (400, "stream_options.continuous_usage_stats")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_is_named_by_its_header_or_else_its_body(stream):
    async with served() as server:
        for header, given, expected in [
            (None, "from-body", "from-body"),
            ("from-header", "from-body", "from-header"),
            ("not plain", "from-body", "from-body"),
        ]:
            headers = {} if header is None else {"X-Request-Id": header}
            body = {"prompt": "a", "request_id": given, "stream": stream}
            async with server.http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers["X-Request-Id"] == expected
        for given in ("a b", "", "x" * 129, "\u2028"):
            status, answer = await server.post("/v1/completions", {"prompt": "a", "request_id": given})
            assert (status, answer["error"]["param"]) == (400, "request_id")


async def test_two_requests_may_have_one_name():
    async with served() as server:
        body = {"prompt": ["a", "b"], "request_id": "twice", "max_tokens": 50, "ignore_eos": True}
        async with server.http.post("/v1/completions", json={**body, "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            assert (await server.post("/v1/completions", body))[0] == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/metrics", "/v1/models", "/v1/models/scripted"])
async def test_what_can_be_got_can_be_asked_for_its_head(path):
    async with served() as server:
        async with server.http.get(path) as whole, server.http.head(path) as head:
            assert head.status == whole.status == 200
            assert head.content_type == whole.content_type
            assert await head.read() == b""
        async with server.http.options(path) as options:
            assert options.status == 405
            assert options.headers["Allow"] == "GET,HEAD"


@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 400)])
async def test_parts_of_tool_calls_have_a_length(extra, status):
    async with served() as server:
        for field in ("id", "type", "name"):
            long = "x" * (MAX_NAME_CHARS + extra)
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            (call["function"] if field == "name" else call)[field] = long
            body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
            got, answer = await server.post("/v1/chat/completions", body)
            assert got == status
            if status == 400:
                assert answer["error"]["param"].startswith("messages[1].tool_calls[0].")


@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 400)])
async def test_log_probabilities_of_prompts_are_bounded(extra, status, monkeypatch):
    monkeypatch.setattr("metrale_async.api.generation.MAX_PROMPT_LOGPROBS", 4 * 3 * 10)
    assert MAX_PROMPT_LOGPROBS >= 32768 * 21
    async with served() as server:
        body = {"prompt": "a" * (10 + extra), "max_tokens": 1, "n": 4, "seed": 1}
        for asked in ({"echo": True, "logprobs": 2}, {"prompt_logprobs": 2}):
            got, answer = await server.post("/v1/completions", {**body, **asked})
            assert got == status
            if status == 400:
                assert answer["error"]["param"] == "prompt_logprobs"
        chat = {"messages": MESSAGES, "max_tokens": 1, "n": 4, "prompt_logprobs": 2}
        assert (await server.post("/v1/chat/completions", chat))[0] == 200


@pytest.mark.parametrize("prompt", ["a" * 100, [97] * 100])
async def test_echoed_text_is_bounded(prompt, monkeypatch):
    monkeypatch.setattr(completions, "MAX_ECHOED_CHARS", 399)
    assert MAX_ECHOED_CHARS >= 2**20
    async with served() as server:
        body = {"prompt": prompt, "echo": True, "max_tokens": 1, "seed": 1}
        assert (await server.post("/v1/completions", {**body, "n": 3}))[0] == 200
        status, answer = await server.post("/v1/completions", {**body, "n": 4})
        assert (status, answer["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize(("extra", "on_the_loop"), [(-1, True), (0, True), (1, False)])
async def test_long_bodies_are_read_beside_the_loop(extra, on_the_loop, monkeypatch):
    threads = []
    parse = json_body.parse_json_object

    def note_thread(body):
        threads.append(threading.get_ident())
        return parse(body)

    monkeypatch.setattr(json_body, "parse_json_object", note_thread)
    async with served(**LONG) as server:
        body = b'{"max_tokens": 1, "prompt": "a"}'
        body += b" " * (json_body.MAX_INLINE_BYTES + extra - len(body))
        headers = {"Content-Type": "application/json"}
        async with server.http.post("/v1/completions", data=body, headers=headers) as response:
            assert response.status == 200
    assert [thread == threading.get_ident() for thread in threads] == [on_the_loop]


async def test_a_long_prompt_is_echoed_beside_the_loop_and_the_rest_on_it(monkeypatch):
    threads = []
    encode = completions.CompletionEventEncoder.encode

    def note_thread(self, prompt_index, batch):
        threads.append(threading.get_ident())
        return encode(self, prompt_index, batch)

    monkeypatch.setattr(completions.CompletionEventEncoder, "encode", note_thread)
    async with served(**LONG) as server:
        body = {"prompt": "ab" * 1000, "echo": True, "logprobs": 1, "max_tokens": 20, "temperature": 0}
        _, whole = await server.post("/v1/completions", body)
        streamed = await events(server, body)
        text = "".join(choice["text"] for event in streamed for choice in event["choices"])
        assert text == whole["choices"][0]["text"]
    assert threads[0] != threading.get_ident()
    assert set(threads[1:]) == {threading.get_ident()}


async def test_a_prompt_longer_than_the_context_is_refused_before_it_is_looked_at():
    async with served() as server:
        for length, code in [(1023, None), (1024, "context_length_exceeded"), (200_000, "context_length_exceeded")]:
            # The id that the model does not have would be found by looking.
            prompt = [97] * (length - 1) + ([98] if code is None else [10**6])
            status, answer = await server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True})
            assert status == (200 if code is None else 400)
            if code is not None:
                assert answer["error"]["code"] == code
                assert str(length) in answer["error"]["message"]
                assert "1024" in answer["error"]["message"]


async def test_a_client_cannot_fill_the_log_with_names(log):
    out = log("json")
    async with served() as server:
        unknown = {f"unheard_of_{number}_" + "x" * 200: 1 for number in range(1000)}
        async with server.http.post("/v1/completions", json={"prompt": "a", **unknown}) as response:
            assert response.status == 200
            answer = await response.json()
    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert line["ignored_fields"].startswith("unheard_of_0_xx")
    assert line["ignored_fields"].endswith(",and 984 more")
    assert len(line["ignored_fields"]) < 16 * 66 + 20
    assert line["response_id"] == answer["id"]


async def test_metrics_say_what_runs():
    async with served() as server, server.http.get("/metrics") as response:
        text = await response.text()
    assert 'metrale_model_info{max_seq_len="1024",model="scripted"} 1.0' in text
    async with served(start=False) as server, server.http.get("/metrics") as response:
        text = await response.text()
    assert "metrale_ready 0.0" in text
    assert "metrale_model_info" not in text
    assert "metrale_build_info" not in text
    assert b'metrale_build_info{version="1.2"} 1.0' in Metrics("1.2").exposition()[0]


async def test_others_have_their_turn_while_many_short_prompts_are_encoded_and_submitted(monkeypatch):
    turns = 0
    seen = []

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with served(**LONG) as server:
        submit = server.engine.submit

        def noting_submit(*args, **options):
            seen.append(turns)
            return submit(*args, **options)

        monkeypatch.setattr(server.engine, "submit", noting_submit)
        waiting = asyncio.create_task(others())
        body = {"prompt": ["a" * 1000] * 200, "max_tokens": 1}
        assert (await server.post("/v1/completions", body))[0] == 200
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert len(seen) == 200
    assert len(set(seen)) > 5
