"""Tokens: who gets in, when it is decided, and what is told."""

from __future__ import annotations

import asyncio

import openai
import pytest

from metrale_async.api import ServerArgs
from metrale_async.api.auth import TokenCheck
from metrale_async.errors import AuthenticationError, ConfigurationError
from tests.api.server import served

TOKEN = "correct-horse-battery"


@pytest.fixture
def auth(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# people\n\nother-token-1234\n  {TOKEN}  \n")
    path.chmod(0o600)
    return ServerArgs(require_auth=True, auth_tokens_file=str(path))


ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/scripted"),
    ("GET", "/metrics"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("GET", "/health/../metrics"),
    ("GET", "/health/live/"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_but_health_asks_for_a_token(auth, method, path):
    async with served(server_args=auth) as server:
        for headers in ({}, {"Authorization": "Bearer wrong-token"}, {"Authorization": f"Basic {TOKEN}"}):
            async with server.http.request(method, path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_health_is_public(auth):
    async with served(server_args=auth) as server:
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/health/live"))[0] == 200


async def test_the_official_client_passes_with_any_of_the_tokens(auth):
    async with served(server_args=auth) as server:
        for token in (TOKEN, "other-token-1234"):
            async with server.openai(token) as client:
                assert (await client.models.list()).data[0].id == "scripted"
        async with server.openai("other-token-123") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
async def test_the_refusal_comes_before_the_body(auth, expect):
    async with served(server_args=auth) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{expect}"
        writer.write(f"{head}Content-Length: 1000000\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_a_client_that_waits_to_be_told_is_told_to_go_on(auth):
    async with served(server_args=auth) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        body = b'{"prompt": "a"}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: bearer {TOKEN}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKEN,
        f"Bearer{TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \udcff",
    ],
)
def test_whatever_is_not_bearer_and_a_token_is_refused(header):
    with pytest.raises(AuthenticationError) as refusal:
        TokenCheck([TOKEN]).check(header)
    assert TOKEN not in refusal.value.message


@pytest.mark.parametrize(
    "content", [b"", b"# nothing\n", b"short\n", b"with a space\n", b"\xff\xfe123456\n", b"x" * 2**21]
)
def test_a_file_that_would_let_nobody_or_everybody_in_is_refused(tmp_path, content):
    (tmp_path / "tokens").write_bytes(content)
    with pytest.raises(ConfigurationError, match="--auth-tokens-file"):
        TokenCheck.from_file(tmp_path / "tokens")


def test_half_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--auth-tokens-file"):
        ServerArgs(require_auth=True)
    with pytest.raises(ConfigurationError, match="--require-auth"):
        ServerArgs(auth_tokens_file="x")
    with pytest.raises(ConfigurationError, match="--auth-tokens-file"):
        TokenCheck.from_file(tmp_path / "missing")
