"""/tokenize, /detokenize and the model list."""

from __future__ import annotations

from metrale_async.api import ServerArgs
from tests.api.server import served


async def test_text_goes_to_tokens_and_back():
    async with served() as server:
        text = "naïve \N{GRINNING FACE}\tand 12"
        _, tokens = await server.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert tokens["tokens"] == list(text.encode())
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == 1024
        _, back = await server.post("/detokenize", {"tokens": tokens["tokens"]})
        assert back == {"prompt": text}


async def test_messages_are_tokenized_as_a_chat_sees_them():
    async with served() as server:
        messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        _, tokens = await server.post("/tokenize", {"messages": messages})
        assert bytes(tokens["tokens"]) == b"user: hi\nassistant: "
        assert tokens["token_strs"] is None


async def test_token_ids_outside_the_vocabulary_are_refused():
    async with served() as server:
        for tokens in ([257], [-1], [2**63], ["a"], None):
            status, answer = await server.post("/detokenize", {"tokens": tokens})
            assert status == 400
            assert answer["error"]["param"].startswith("tokens")


async def test_the_served_model_is_listed_under_its_name():
    async with served(server_args=ServerArgs(served_model_name="org/name")) as server, server.openai() as client:
        (model,) = (await client.models.list()).data
        assert model.id == "org/name"
        assert (await server.get("/v1/models/org/name"))[1] == (await server.get("/v1/models"))[1]["data"][0]
        status, answer = await server.get("/v1/models/other")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        answer = await client.completions.create(model="org/name", prompt="a")
        assert answer.model == "org/name"
