"""Whatever is sent, the answer is a 4xx in OpenAI's shape, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import re

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrale_async.api import ServerArgs
from metrale_async.api.fields import LABELS, NEUTRAL_VALUES
from metrale_async.api.limits import MAX_CONTENT_PARTS, MAX_MESSAGES
from metrale_async.api.schemas import ChatCompletionRequest, CompletionRequest
from tests.api.server import Server, served

JSON_HEADERS = {"Content-Type": "application/json"}
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]


async def post_bytes(server: Server, path: str, body: bytes, headers: dict[str, str] = JSON_HEADERS):
    async with server.http.post(path, data=body, headers=headers) as response:
        return response.status, await response.read()


def is_openai_error(body: bytes) -> bool:
    error = json.loads(body)["error"]
    return {*error} == {"message", "type", "param", "code"} and isinstance(error["message"], str)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\x00",
        b"\xff\xfe{\x00}\x00",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a\x00"}',
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt": [' + b"1," * 600_000 + b"1]}",
    ],
)
async def test_bytes_that_are_no_request_are_refused(path, body):
    async with served() as server:
        status, answer = await post_bytes(server, path, body)
        assert status == 400
        assert is_openai_error(answer)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"]
)
async def test_another_content_type_is_refused(content_type):
    async with served() as server:
        status, answer = await post_bytes(server, "/tokenize", b'{"prompt": "a"}', {"Content-Type": content_type})
        assert status == 415
        assert is_openai_error(answer)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "nonsense"])
async def test_a_compressed_body_is_refused_and_not_unpacked(encoding):
    async with served() as server:
        headers = {**JSON_HEADERS, "Content-Encoding": encoding}
        status, answer = await post_bytes(server, "/tokenize", b"\x1f\x8b" + bytes(100), headers)
        assert status == 415
        assert is_openai_error(answer)


@pytest.mark.parametrize(("extra", "status"), [(-1, 200), (0, 200), (1, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_body_is_bounded(extra, status, chunked):
    args = ServerArgs(max_body_mb=0.01)
    async with served(server_args=args) as server:
        size = args.max_body_bytes + extra
        body = b'{"prompt": "' + b"a" * (size - 14) + b'"}'
        assert len(body) == size

        async def pieces():
            for start in range(0, size, 1000):
                yield body[start : start + 1000]

        async with server.http.post("/tokenize", data=pieces() if chunked else body, headers=JSON_HEADERS) as response:
            assert response.status == status
            if status == 413:
                assert is_openai_error(await response.read())


async def test_unknown_routes_and_methods_are_told_in_the_same_shape():
    async with served() as server:
        for method, path, status in [
            ("GET", "/", 404),
            ("GET", "/v1/chat/completions", 405),
            ("PUT", "/v1/models", 405),
            ("POST", "/v1/embeddings", 404),
            ("GET", "/v1/models/", 404),
        ]:
            async with server.http.request(method, path) as response:
                assert response.status == status
                assert is_openai_error(await response.read())
                assert (response.headers.get("Allow") is not None) == (status == 405)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX\x00Y: 1\r\n\r\n",
    ],
)
async def test_bytes_that_are_not_http_get_a_400_and_no_traceback(raw, caplog):
    async with served() as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(raw)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
        assert (await server.get("/health"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1), "messages"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}] * (MAX_CONTENT_PARTS + 1)}],
            "messages[0].content",
        ),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": "n" * 257}], "messages[0].name"),
        ("hello", "messages"),
        ([1], "messages[0]"),
    ],
)
async def test_messages_that_make_no_chat_are_refused_by_name(messages, param):
    async with served() as server:
        status, answer = await server.post("/v1/chat/completions", {"messages": messages})
        assert (status, answer["error"]["param"]) == (400, param)


@pytest.mark.parametrize("extra", [-1, 0])
async def test_as_many_messages_as_allowed_are_read(extra):
    async with served() as server:
        messages = [{"role": "user", "content": ""}] * (MAX_MESSAGES + extra)
        status, answer = await server.post("/tokenize", {"messages": messages})
        assert status == 200
        assert answer["count"] == len("user: \n") * len(messages) + len("assistant: ")


async def test_a_request_id_comes_back_unless_it_could_forge_a_log_line():
    async with served() as server:
        for given, comes_back in [("abc-1.2:3", True), ("a b", False), ("x" * 129, False), ("\N{SNOWMAN}", False)]:
            async with server.http.get("/health", headers={"X-Request-Id": given}) as response:
                assert (response.headers["X-Request-Id"] == given) == comes_back


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**63 - 1, 2**64 - 1, -(2**63)])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["a", "user", "text", "none", "auto", "\0", "\ud800"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "1", "include_usage"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"])}, optional={"content": VALUES}),
    max_size=3,
)


def bodies(schema, **likely):
    names = sorted({*schema.__struct_fields__, *LABELS, *NEUTRAL_VALUES, "unheard_of"} - {"max_tokens"} - {*likely})
    some = st.dictionaries(st.sampled_from(names), VALUES, max_size=4)
    return st.builds(lambda first, more: {"max_tokens": 2, **more, **first}, st.fixed_dictionaries(likely), some)


REQUESTS = (
    st.tuples(st.just("/v1/completions"), bodies(CompletionRequest, prompt=st.just("ab") | VALUES))
    | st.tuples(
        st.just("/v1/chat/completions"),
        bodies(ChatCompletionRequest, messages=st.just([{"role": "user", "content": "a"}]) | MESSAGES | VALUES),
    )
    | st.tuples(
        st.just("/tokenize"), st.dictionaries(st.sampled_from(["prompt", "messages", "model"]), VALUES, max_size=2)
    )
    | st.tuples(st.just("/detokenize"), st.dictionaries(st.sampled_from(["tokens", "model"]), VALUES, max_size=2))
)


def test_no_body_makes_the_server_fail():
    """One server for all examples; each is a request on a real socket."""
    seen: dict[int, int] = {}
    with asyncio.Runner() as runner:

        @settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(REQUESTS)
        def send(request):
            path, body = request
            data = json.dumps(body, allow_nan=False).encode()
            status, answer = runner.run(post_bytes(server, path, data))
            seen[status] = seen.get(status, 0) + 1
            assert status in (200, 400, 404), answer
            if status != 200:
                assert is_openai_error(answer)
            elif answer.startswith(b"data: "):
                assert answer.endswith(b"data: [DONE]\n\n")
                for event in re.findall(rb"data: (\{.*\})\n\n", answer):
                    assert "error" not in orjson.loads(event)

        context = served()
        server = runner.run(context.__aenter__())
        try:
            send()
        finally:
            runner.run(context.__aexit__(None, None, None))
    # Both kinds came up; how often is up to the examples drawn.
    assert seen[200] > 0
    assert seen[400] > 0
