"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio.to_thread
from aiohttp import web

from metrale_async.api.chat_prompt import encode_messages
from metrale_async.api.context import SERVICE, SUMMARY
from metrale_async.api.failures import json_response
from metrale_async.api.json_body import read_json_object
from metrale_async.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, read_fields
from metrale_async.errors import InvalidRequestError

_MAX_INLINE_TOKENS: Final = 2000
"""More tokens are looked up on a worker thread: one takes about a microsecond."""


async def tokenize(request: web.Request) -> web.Response:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    body = await read_json_object(request)
    tokenizer = service.engine.tokenizer
    if "messages" in body:
        chat, summary.ignored_fields = read_fields(body, TokenizeChatRequest)
        service.check_model(chat.model)
        token_ids = await encode_messages(tokenizer, chat)
        with_texts = chat.return_token_strs
    else:
        text, summary.ignored_fields = read_fields(body, TokenizeTextRequest)
        service.check_model(text.model)
        adds = text.add_special_tokens is None or text.add_special_tokens
        token_ids = await tokenizer.encode_async(text.prompt, add_special_tokens=adds)
        with_texts = text.return_token_strs
    summary.prompt_tokens = len(token_ids)

    def texts() -> list[str]:
        return [tokenizer.token_text(token_id) for token_id in token_ids]

    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": service.engine.max_seq_len,
            "tokens": token_ids,
            "token_strs": await anyio.to_thread.run_sync(texts) if with_texts else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    fields, summary.ignored_fields = read_fields(await read_json_object(request), DetokenizeRequest)
    service.check_model(fields.model)
    _check_token_ids(fields.tokens, service.engine.vocab_size)

    def decode() -> str:
        return service.engine.tokenizer.decode(fields.tokens, skip_special_tokens=False)

    inline = len(fields.tokens) <= _MAX_INLINE_TOKENS
    return json_response({"prompt": decode() if inline else await anyio.to_thread.run_sync(decode)})


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens holds token id {token_id}; allowed: 0 to {vocab_size - 1}", param="tokens"
            )
