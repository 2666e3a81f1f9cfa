"""Cached prefixes over HTTP: what is told of them, and who shares them."""

from tests.api.server import served

PROMPT = "0123456789abcdef" * 8


async def test_cached_tokens_are_told_and_counted():
    async with served(prefix_caching=True) as server:
        body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1}
        answers = [(await server.post("/v1/completions", body))[1] for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        assert cached == [0, 127]
        assert await server.metric("metrale_prefix_cache_hit_tokens_total") == 127
        assert await server.metric("metrale_prefix_cache_missed_tokens_total") == 128 + 1
        assert await server.metric("metrale_prefix_cache_blocks") == 8
        assert await server.metric("metrale_prefix_cache_idle_blocks") == 8


async def test_a_salt_separates_tenants():
    async with served(prefix_caching=True) as server:
        cached = []
        for salt in ("a", "a", "b", None):
            body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2, "cache_salt": salt}
            _, answer = await server.post("/v1/chat/completions", body)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == cached[3] == 0
        assert cached[1] > 100


async def test_a_salt_has_a_length():
    async with served() as server:
        for length, status in ((256, 200), (257, 400)):
            body = {"prompt": "x", "max_tokens": 1, "cache_salt": "s" * length}
            got, answer = await server.post("/v1/completions", body)
            assert got == status
        assert answer["error"]["param"] == "cache_salt"


async def test_echo_with_logprobs_is_whole_with_the_cache_on():
    async with served(prefix_caching=True) as server:
        body = {"prompt": PROMPT, "max_tokens": 4, "seed": 1, "echo": True, "logprobs": 1}
        first, again = [(await server.post("/v1/completions", body))[1] for _ in range(2)]
        assert first["choices"] == again["choices"]
        assert len(again["choices"][0]["logprobs"]["tokens"]) == len(PROMPT) + 4
