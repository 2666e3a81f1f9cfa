"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import orjson
from aiohttp import web

from metrale_async.api.chat_prompt import encode_messages, template_messages
from metrale_async.api.context import SERVICE, SUMMARY, Service
from metrale_async.api.event_stream import EventStream, send_events
from metrale_async.api.failures import json_response
from metrale_async.api.generation import (
    check_prompts,
    collect,
    cost_of_answer,
    note_request,
    read_streams,
    submitted,
    usage_object,
)
from metrale_async.api.json_body import read_json
from metrale_async.api.limits import MAX_INLINE_LOGPROBS
from metrale_async.api.logprobs import chat_logprobs, prompt_logprobs
from metrale_async.api.request_log import note_request_id
from metrale_async.api.sampling import sampling_params
from metrale_async.api.schemas import ChatCompletionRequest, UsageInStream, check_stream_options, read_fields
from metrale_async.engine import (
    ChoiceOutput,
    GenerationStream,
    OutputDelta,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
    Usage,
)
from metrale_async.errors import InvalidRequestError
from metrale_async.text import Tokenizer


async def chat_completions(request: web.Request) -> web.StreamResponse:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    fields, summary.ignored_fields, messages = await read_json(request, _read_body)
    note_request_id(request, summary, fields.request_id)
    summary.stream = bool(fields.stream)
    model = service.check_model(fields.model)
    usage = check_stream_options(fields)
    params = _params(service, fields)
    prompt = await encode_messages(service.engine.tokenizer, fields, messages)
    check_prompts(service.engine, [prompt], params)
    answer = ChatAnswer(service, fields, params, model)
    note_request(summary, service.engine, answer.id, [prompt], params.n, log_prompts=service.args.log_prompts)
    async with submitted(service.engine, [prompt], params, answer.id, fields.cache_salt) as streams:
        if not fields.stream:
            (output,) = await collect(streams)
            summary.note_output([output])
            return await answer.whole(output)

        async def produce(events: EventStream) -> None:
            encoder = ChatEventEncoder(answer, streams[0], usage)

            async def send(_: int, batch: list[OutputDelta]) -> None:
                summary.note_batch(batch)
                events_of_batch = encoder.encode(batch)
                if events_of_batch:
                    await events.write(events_of_batch)

            await read_streams(streams, send, 1 if params.logprobs is None else 2 + params.logprobs)

        return await send_events(request, produce)


def _read_body(body: dict[str, Any]) -> tuple[ChatCompletionRequest, list[str], list[dict[str, Any]]]:
    fields, unknown = read_fields(body, ChatCompletionRequest)
    return fields, unknown, template_messages(fields.messages)


def _params(service: Service, fields: ChatCompletionRequest) -> SamplingParams:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    top_logprobs = fields.top_logprobs or 0
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    if fields.max_tokens not in (None, max_tokens):
        raise InvalidRequestError(
            f"max_tokens is {fields.max_tokens} and max_completion_tokens, its newer name, is {max_tokens}; "
            "allowed: one of them, or both with the same value",
            param="max_tokens",
        )
    try:
        return sampling_params(
            fields,
            service.engine.sampling_defaults,
            max_tokens=max_tokens,
            logprobs=top_logprobs if fields.logprobs else None,
        )
    except InvalidRequestError as error:
        # The engine knows these two by other names.
        if error.param == "logprobs":
            raise InvalidRequestError(f"top_{error.message}", param="top_logprobs") from error
        if error.param == "max_tokens" and fields.max_completion_tokens is not None:
            message = error.message.replace("max_tokens", "max_completion_tokens")
            raise InvalidRequestError(message, param="max_completion_tokens") from error
        raise


class ChatAnswer:
    """What all events and the whole answer of one request have in common."""

    def __init__(self, service: Service, fields: ChatCompletionRequest, params: SamplingParams, model: str) -> None:
        self.id = f"chatcmpl-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self.params = params
        self.tokenizer: Tokenizer = service.engine.tokenizer
        self.returns_token_ids = bool(fields.return_token_ids)

    async def whole(self, output: RequestOutput) -> web.Response:
        if cost_of_answer(self.params, [output]) > MAX_INLINE_LOGPROBS:
            return json_response(await anyio.to_thread.run_sync(self._json, output))
        return json_response(self._json(output))

    def _json(self, output: RequestOutput) -> bytes:
        made: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            # One at a time, since orjson keeps the interpreter lock.
            "choices": [orjson.Fragment(orjson.dumps(self._choice(choice))) for choice in output.choices],
            "usage": usage_object([output.usage]),
        }
        if self.params.prompt_logprobs is not None:
            entries = output.prompt_logprobs or ()
            made["prompt_logprobs"] = prompt_logprobs(self.tokenizer, entries, self.params.prompt_logprobs)
        if self.returns_token_ids:
            made["prompt_token_ids"] = output.prompt_token_ids
        return orjson.dumps(made)

    def _choice(self, choice: ChoiceOutput) -> dict[str, Any]:
        made = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self.logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.returns_token_ids:
            made["token_ids"] = choice.token_ids
        return made

    def logprobs(self, entries: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        if self.params.logprobs is None:
            return None
        return {"content": chat_logprobs(self.tokenizer, entries or ()), "refusal": None}


class ChatEventEncoder:
    """Deltas to events. The constant parts are encoded once; a plain delta costs one call of orjson."""

    def __init__(self, answer: ChatAnswer, stream: GenerationStream, usage: UsageInStream) -> None:
        self._answer = answer
        self._stream = stream
        self._usage = usage
        self._completion_tokens = 0
        head = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._usage_null = b"" if usage is UsageInStream.NEVER else b',"usage":null'
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._plain_heads = [
            self._head + b',"choices":[{"index":%d,"delta":{"content":' % index for index in range(answer.params.n)
        ]
        self._begun = [False] * answer.params.n
        self._is_plain = (
            answer.params.logprobs is None and not answer.returns_token_ids and usage is not UsageInStream.ALWAYS
        )

    def encode(self, batch: list[OutputDelta]) -> bytes:
        """All events of what one wake-up brought."""
        parts: list[bytes] = []
        for delta in batch:
            index = delta.index
            if not self._begun[index]:
                self._begun[index] = True
                parts.append(self._role_event(index))
            if not self._is_plain:
                self._completion_tokens += len(delta.token_ids)
                if delta.text or delta.token_ids:
                    parts.append(self._rich_event(delta))
            elif delta.text:
                parts += (self._plain_heads[index], orjson.dumps(delta.text), self._plain_tail)
            if delta.finish_reason is not None:
                parts.append(self._finish_event(delta))
            if delta.usage is not None and self._usage is not UsageInStream.NEVER:
                usage = orjson.dumps(usage_object([delta.usage]))
                parts += (self._head, b',"choices":[],"usage":', usage, b"}\n\n")
        return b"".join(parts)

    def _role_event(self, index: int) -> bytes:
        extra = {}
        if self._answer.returns_token_ids and not any(self._begun[:index] + self._begun[index + 1 :]):
            extra["prompt_token_ids"] = self._stream.prompt_token_ids
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}}, extra)

    def _rich_event(self, delta: OutputDelta) -> bytes:
        choice: dict[str, Any] = {"index": delta.index, "delta": {"content": delta.text}}
        if delta.token_ids:
            choice["logprobs"] = self._answer.logprobs(delta.logprobs)
        if self._answer.returns_token_ids:
            choice["token_ids"] = delta.token_ids
        return self._event(choice, {})

    def _finish_event(self, delta: OutputDelta) -> bytes:
        choice = {"index": delta.index, "delta": {}, "finish_reason": delta.finish_reason}
        return self._event({**choice, "stop_reason": delta.stop_reason}, {})

    def _event(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        rest = {"choices": [{"logprobs": None, "finish_reason": None, **choice}], **extra}
        usage = self._usage_null
        if self._usage is UsageInStream.ALWAYS:
            so_far = Usage(len(self._stream.prompt_token_ids), self._completion_tokens)
            usage = b',"usage":' + orjson.dumps(usage_object([so_far]))
        return self._head + b"," + orjson.dumps(rest)[1:-1] + usage + b"}\n\n"
