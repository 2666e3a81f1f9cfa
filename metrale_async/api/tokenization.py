"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio.to_thread
import orjson
from aiohttp import web

from metrale_async.api.chat_prompt import encode_messages, template_messages
from metrale_async.api.context import SERVICE, SUMMARY
from metrale_async.api.failures import json_response
from metrale_async.api.json_body import read_json
from metrale_async.api.logprobs import json_list
from metrale_async.api.schemas import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, read_fields
from metrale_async.errors import InvalidRequestError

_MAX_INLINE_TOKENS: Final = 2000
"""More tokens are looked up on a worker thread: one takes about a microsecond."""

ReadBody = tuple[TokenizeChatRequest, list[str], list[dict[str, Any]]] | tuple[TokenizeTextRequest, list[str], None]


async def tokenize(request: web.Request) -> web.Response:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    fields, summary.ignored_fields, messages = await read_json(request, _read_body)
    service.check_model(fields.model)
    tokenizer = service.engine.tokenizer
    if isinstance(fields, TokenizeChatRequest):
        token_ids = await encode_messages(tokenizer, fields, messages or ())
    else:
        adds = fields.add_special_tokens is None or fields.add_special_tokens
        token_ids = await tokenizer.encode_async(fields.prompt, add_special_tokens=adds)
    summary.prompt_tokens = len(token_ids)

    def answer() -> bytes:
        texts = map(tokenizer.token_text, token_ids)
        made = {
            "count": len(token_ids),
            "max_model_len": service.engine.max_seq_len,
            "tokens": json_list(token_ids),
            "token_strs": json_list(texts) if fields.return_token_strs else None,
        }
        return orjson.dumps(made)

    return json_response(await _in_turn(answer, len(token_ids)))


async def detokenize(request: web.Request) -> web.Response:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    fields, summary.ignored_fields = await read_json(request, lambda body: read_fields(body, DetokenizeRequest))
    service.check_model(fields.model)

    def answer() -> bytes:
        _check_token_ids(fields.tokens, service.engine.vocab_size)
        return orjson.dumps({"prompt": service.engine.tokenizer.decode(fields.tokens, skip_special_tokens=False)})

    return json_response(await _in_turn(answer, len(fields.tokens)))


def _read_body(body: dict[str, Any]) -> ReadBody:
    if "messages" in body:
        chat, unknown = read_fields(body, TokenizeChatRequest)
        return chat, unknown, template_messages(chat.messages)
    text, unknown = read_fields(body, TokenizeTextRequest)
    return text, unknown, None


async def _in_turn(work: Callable[[], bytes], tokens: int) -> bytes:
    return work() if tokens <= _MAX_INLINE_TOKENS else await anyio.to_thread.run_sync(work)


def _check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"tokens holds token id {token_id}; allowed: 0 to {vocab_size - 1}", param="tokens"
            )
