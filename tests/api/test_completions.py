"""Text completions: every form of prompt, echo, logprobs, several prompts and choices."""

from __future__ import annotations

import json

import openai
import pytest

from metrale_async.api.limits import MAX_CHOICES, MAX_PROMPTS
from tests.api.server import Server, served

FORMS = ["ab", ["ab"], [97, 98], [[97, 98]]]


async def events(server: Server, body: dict, path: str = "/v1/completions") -> list[dict]:
    """The events of a stream, which is checked to be well-formed and to end with [DONE]."""
    async with server.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


@pytest.mark.parametrize("prompt", FORMS)
async def test_all_forms_of_a_prompt_give_the_same_answer(prompt):
    async with served() as server, server.openai() as client:
        answer = await client.completions.create(model="scripted", prompt=prompt, max_tokens=9, temperature=0)
        expected = await client.completions.create(model="scripted", prompt="ab", max_tokens=9, temperature=0)
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.usage.prompt_tokens == 2
        assert answer.object == "text_completion"


async def test_prompts_and_choices_are_numbered_through():
    async with served() as server, server.openai() as client:
        request = {"model": "scripted", "prompt": ["ab", "cdef"], "n": 3, "seed": 5, "max_tokens": 20}
        whole = await client.completions.create(**request)
        assert [choice.index for choice in whole.choices] == list(range(6))
        assert whole.usage.prompt_tokens == 6
        texts = [""] * 6
        finishes = [None] * 6
        async for chunk in await client.completions.create(**request, stream=True):
            for choice in chunk.choices:
                assert finishes[choice.index] is None
                texts[choice.index] += choice.text
                finishes[choice.index] = choice.finish_reason
        assert texts == [choice.text for choice in whole.choices]
        assert finishes == [choice.finish_reason for choice in whole.choices]


async def test_sixteen_tokens_unless_asked_otherwise():
    async with served() as server:
        _, answer = await server.post("/v1/completions", {"prompt": "ab", "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [*FORMS, ["ab", "xyz"]])
@pytest.mark.parametrize("n", [1, 2])
async def test_streamed_echo_and_logprobs_are_those_of_the_whole_answer(prompt, n):
    async with served() as server:
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 7, "seed": 1, "n": n}
        _, whole = await server.post("/v1/completions", body)
        found = [
            {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
            for _ in whole["choices"]
        ]
        for event in await events(server, body):
            for choice in event["choices"]:
                found[choice["index"]]["text"] += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    found[choice["index"]][name] += values
        assert found == [{"text": choice["text"], **choice["logprobs"]} for choice in whole["choices"]]
        for choice in whole["choices"]:
            logprobs = choice["logprobs"]
            assert choice["text"].startswith(("ab", "xyz"))
            assert logprobs["token_logprobs"][0] is None
            assert all(value is not None for value in logprobs["token_logprobs"][1:])
            assert {len(values) for values in logprobs.values()} == {len(logprobs["tokens"])}
            assert logprobs["text_offset"][:2] == [0, 1]
            # Bytes that are no character all read U+FFFD, and share a place.
            assert all(1 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


async def test_text_offsets_point_at_the_tokens():
    async with served() as server:
        body = {"prompt": "naïve ", "echo": True, "logprobs": 0, "max_tokens": 30, "temperature": 0}
        _, answer = await server.post("/v1/completions", body)
        choice = answer["choices"][0]
        for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
            if token.isascii():
                # The bytes before it may have been half a character, which its U+FFFD stands for.
                assert choice["text"][offset:].removeprefix("\N{REPLACEMENT CHARACTER}").startswith(token)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_generating(stream):
    async with served() as server:
        body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
        if stream:
            choices = [choice for event in await events(server, body) for choice in event["choices"]]
            assert "".join(choice["text"] for choice in choices) == "abc"
            assert [choice["finish_reason"] for choice in choices] == [None, "length"]
        else:
            _, answer = await server.post("/v1/completions", body)
            assert answer["choices"][0]["text"] == "abc"
            assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_have_an_entry_for_every_position():
    async with served() as server:
        body = {"prompt": "abcd", "prompt_logprobs": 2, "max_tokens": 1, "echo": True, "logprobs": 0}
        _, answer = await server.post("/v1/completions", body)
        first, *rest = answer["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [list(entry) for entry in rest] == [["98", "99"], ["99", "100"], ["100", "101"]]
        assert rest[0]["98"]["decoded_token"] == "b"
        assert rest[0]["98"]["rank"] == 1
        assert [len(top) for top in answer["choices"][0]["logprobs"]["top_logprobs"][1:]] == [1, 1, 1, 1]


async def test_token_ids_are_returned_when_asked_for():
    async with served() as server:
        body = {"prompt": "ab", "max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
        _, answer = await server.post("/v1/completions", body)
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == [97, 98]
        assert len(choice["token_ids"]) == 6
        streamed = [choice for event in await events(server, body) for choice in event["choices"]]
        assert streamed[0]["prompt_token_ids"] == [97, 98]
        assert [token for choice in streamed for token in choice["token_ids"]] == choice["token_ids"]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt"),
        ({"prompt": ["a"] * (MAX_CHOICES // 2 + 1), "n": 2}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"seed": 10**30}, "seed"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(extra, param):
    async with served() as server:
        status, answer = await server.post("/v1/completions", {"prompt": "a", **extra})
        assert status == 400
        assert answer["error"]["param"] == param
        assert answer["error"]["type"] == "invalid_request_error"


async def test_what_asks_for_nothing_and_what_nobody_knows_is_accepted():
    async with served() as server:
        body = {
            "prompt": "a",
            "suffix": None,
            "best_of": 1,
            "user": "me",
            "store": False,
            "not_a_field": [1],
            "n": None,
        }
        status, _ = await server.post("/v1/completions", body)
        assert status == 200


async def test_as_many_prompts_as_allowed_are_answered():
    async with served() as server:
        status, answer = await server.post("/v1/completions", {"prompt": ["a"] * MAX_PROMPTS, "max_tokens": 1})
        assert status == 200
        assert len(answer["choices"]) == MAX_PROMPTS


async def test_unsupported_values_reach_the_official_client_as_bad_requests():
    async with served() as server, server.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="scripted", prompt="a", suffix="b")
        assert caught.value.code == "unsupported_parameter"
