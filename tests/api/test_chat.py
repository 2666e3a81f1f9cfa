"""Chat completions as the official client sees them."""

from __future__ import annotations

import openai
import pytest

from tests.api.server import served

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_an_answer_has_the_shape_of_openai():
    async with served() as server, server.openai() as client:
        answer = await client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=12, temperature=0)
        assert answer.object == "chat.completion"
        assert answer.id.startswith("chatcmpl-")
        assert answer.model == "scripted"
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "length"
        assert choice.logprobs is None
        assert answer.usage.completion_tokens == 12
        assert answer.usage.prompt_tokens == len("user: hello\nassistant: ")
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_joined_deltas_are_the_whole_answer():
    async with served() as server, server.openai() as client:
        request = {"model": "scripted", "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 3, "n": 3}
        whole = await client.chat.completions.create(**request)
        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
        texts = ["", "", ""]
        finished = [[], [], []]
        roles = [[], [], []]
        for chunk in chunks:
            assert chunk.object == "chat.completion.chunk"
            assert chunk.id == chunks[0].id
            assert chunk.usage is None
            for choice in chunk.choices:
                assert not finished[choice.index], "nothing follows the finish_reason"
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += [choice.delta.role] if choice.delta.role else []
                finished[choice.index] += [choice.finish_reason] if choice.finish_reason else []
        assert texts == [choice.message.content for choice in whole.choices]
        assert finished == [[choice.finish_reason] for choice in whole.choices]
        assert roles == [["assistant"]] * 3


async def test_usage_comes_last_and_only_when_asked_for():
    async with served() as server, server.openai() as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="scripted",
                messages=MESSAGES,
                max_tokens=5,
                n=2,
                extra_body={"ignore_eos": True},
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 10
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_logprobs_have_bytes_and_alternatives():
    async with served() as server, server.openai() as client:
        request = {
            "model": "scripted",
            "messages": MESSAGES,
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 3,
            "temperature": 0,
        }
        whole = await client.chat.completions.create(**request)
        content = whole.choices[0].logprobs.content
        assert len(content) == 8
        assert all(len(entry.top_logprobs) == 3 for entry in content)
        raw = b"".join(bytes(entry.bytes) for entry in content)
        assert raw.decode(errors="replace") == whole.choices[0].message.content
        streamed = []
        async for chunk in await client.chat.completions.create(**request, stream=True):
            for choice in chunk.choices:
                streamed += choice.logprobs.content if choice.logprobs else []
        assert streamed == content


async def test_a_stop_string_ends_the_answer_and_is_not_shown():
    async with served() as server, server.openai() as client:
        request = {"model": "scripted", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
        text = (await client.chat.completions.create(**request)).choices[0].message.content
        pairs = (text[i : i + 2] for i in range(5, len(text)))
        stop = next(pair for pair in pairs if pair.isascii() and text.index(pair) >= 5)
        for value in (stop, [stop], [stop, "never seen"]):
            answer = await client.chat.completions.create(**request, stop=value)
            assert answer.choices[0].finish_reason == "stop"
            assert answer.choices[0].message.content == text[: text.index(stop)]
            assert answer.choices[0].model_extra["stop_reason"] == stop
        streamed = "".join(
            [
                chunk.choices[0].delta.content or ""
                async for chunk in await client.chat.completions.create(**request, stop=stop, stream=True)
            ]
        )
        assert streamed == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_name_the_field_with_and_without_stream(stream):
    async with served() as server, server.openai() as client:
        for extra, param in [
            ({"temperature": 3}, "temperature"),
            ({"n": 0}, "n"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
            ({"max_completion_tokens": 6}, "max_tokens"),
            ({"max_tokens": 10**6}, "max_tokens"),
            ({"messages": []}, "messages"),
            ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ]:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    **{"model": "scripted", "messages": MESSAGES, "max_tokens": 5, "stream": stream, **extra}
                )
            assert caught.value.param == param
            assert caught.value.type == "invalid_request_error"


async def test_another_model_is_not_found():
    async with served() as server, server.openai() as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert caught.value.code == "model_not_found"
