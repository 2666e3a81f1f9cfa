"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from typing import Any

import anyio.to_thread
import orjson
from aiohttp import web

from metrale_async.api.context import SERVICE, SUMMARY, Service
from metrale_async.api.event_stream import EventStream, send_events
from metrale_async.api.failures import json_response
from metrale_async.api.generation import (
    TOKENS_LIKE_A_LOGPROB,
    check_prompts,
    collect,
    cost_of_answer,
    note_request,
    read_streams,
    submitted,
    usage_object,
)
from metrale_async.api.json_body import read_json
from metrale_async.api.limits import MAX_CHOICES, MAX_ECHOED_CHARS, MAX_INLINE_LOGPROBS, MAX_PROMPTS
from metrale_async.api.logprobs import CompletionLogprobs, joined, prompt_logprobs
from metrale_async.api.request_log import note_request_id
from metrale_async.api.sampling import sampling_params
from metrale_async.api.schemas import CompletionRequest, UsageInStream, check_stream_options, read_fields
from metrale_async.engine import ChoiceOutput, OutputDelta, RequestOutput, SamplingParams, TokenLogprobs, Usage
from metrale_async.errors import InvalidRequestError
from metrale_async.text import Tokenizer
from metrale_async.text.tokenizer import MAX_INLINE_CHARS

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for text completions only."""


async def completions(request: web.Request) -> web.StreamResponse:
    service, summary = request.app[SERVICE], request[SUMMARY]
    service.check_ready()
    fields, summary.ignored_fields, prompts = await read_json(request, _read_body)
    note_request_id(request, summary, fields.request_id)
    summary.stream = bool(fields.stream)
    model = service.check_model(fields.model)
    usage = check_stream_options(fields)
    params = _params(service, fields)
    if params.n * len(prompts) > MAX_CHOICES:
        raise InvalidRequestError(
            f"n is {params.n} for each of {len(prompts)} prompts; allowed: {MAX_CHOICES} choices in all", param="n"
        )
    prompt_ids = await _encode_all(service.engine.tokenizer, prompts, fields)
    check_prompts(service.engine, prompt_ids, params, params.n)
    echoed = await _echoed(service, fields, params, prompts) if fields.echo else None
    answer = CompletionAnswer(service, fields, params, model, prompt_ids, echoed)
    note_request(summary, service.engine, answer.id, prompt_ids, params.n, log_prompts=service.args.log_prompts)
    async with submitted(service.engine, prompt_ids, params, answer.id, fields.cache_salt) as streams:
        if not fields.stream:
            outputs = await collect(streams)
            summary.note_output(outputs)
            return await answer.whole(outputs)

        async def produce(events: EventStream) -> None:
            encoder = CompletionEventEncoder(answer, usage)

            async def send(prompt_index: int, batch: list[OutputDelta]) -> None:
                summary.note_batch(batch)
                if encoder.takes_long(prompt_index):
                    events_of_batch = await anyio.to_thread.run_sync(encoder.encode, prompt_index, batch)
                else:
                    events_of_batch = encoder.encode(prompt_index, batch)
                if events_of_batch:
                    await events.write(events_of_batch)

            await read_streams(streams, send, 1 if params.logprobs is None else 2 + params.logprobs)

        return await send_events(request, produce)


def _read_body(body: dict[str, Any]) -> tuple[CompletionRequest, list[str], list[str | Sequence[int]]]:
    fields, unknown = read_fields(body, CompletionRequest)
    return fields, unknown, split_prompts(fields.prompt)


def split_prompts(prompt: str | Sequence[str | int | Sequence[int]]) -> list[str | Sequence[int]]:
    """A text, a list of texts, token ids or a list of those, as a list of prompts. Raises InvalidRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt is an empty list; at least one prompt is needed", param="prompt")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(kinds) > 1:
        raise InvalidRequestError("prompt mixes texts, token ids and lists of them", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequestError(f"prompt holds {len(prompt)} prompts; allowed: up to {MAX_PROMPTS}", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


async def _encode_all(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int]], fields: CompletionRequest
) -> list[Sequence[int]]:
    adds = fields.add_special_tokens is None or fields.add_special_tokens
    encoded: list[Sequence[int]] = []
    chars = 0
    for prompt in prompts:
        if not isinstance(prompt, str):
            encoded.append(prompt)
            continue
        encoded.append(await tokenizer.encode_async(prompt, add_special_tokens=adds))
        chars += len(prompt)
        if chars > MAX_INLINE_CHARS:
            # A short text is encoded here and now, and there may be hundreds of them.
            chars = 0
            await asyncio.sleep(0)
    return encoded


async def _echoed(
    service: Service, fields: CompletionRequest, params: SamplingParams, prompts: Sequence[str | Sequence[int]]
) -> list[str]:
    """The text of the prompts, as the answer repeats it. Raises InvalidRequestError."""
    tokenizer = service.engine.tokenizer

    def text(prompt: str | Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        # Ids that the model does not have are refused later, by the engine.
        known = [token_id for token_id in prompt if 0 <= token_id < 2**31]
        return tokenizer.decode(known, skip_special_tokens=params.skip_special_tokens)

    def work() -> list[str]:
        return [text(prompt) for prompt in prompts]

    tokens = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
    made = await anyio.to_thread.run_sync(work) if tokens > MAX_INLINE_LOGPROBS else work()
    chars = sum(map(len, made)) * params.n
    if chars > MAX_ECHOED_CHARS:
        raise InvalidRequestError(
            f"echo would repeat {chars} characters; allowed: up to {MAX_ECHOED_CHARS}", param="echo"
        )
    return made


def _params(service: Service, fields: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    overrides: dict[str, Any] = {}
    if fields.echo and fields.logprobs is not None:
        # The prompt's own tokens are part of the text.
        overrides["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    if fields.echo and max_tokens == 0:
        # Scoring a prompt: the engine always generates, so one token is generated and not shown.
        max_tokens = 1
        overrides["min_tokens"] = 0
    return sampling_params(
        fields, service.engine.sampling_defaults, max_tokens=max_tokens, logprobs=fields.logprobs, **overrides
    )


class CompletionAnswer:
    """What all events and the whole answer of one request have in common."""

    def __init__(
        self,
        service: Service,
        fields: CompletionRequest,
        params: SamplingParams,
        model: str,
        prompt_ids: Sequence[Sequence[int]],
        echoed: Sequence[str] | None,
    ) -> None:
        self.id = f"cmpl-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self.params = params
        self.prompt_ids = prompt_ids
        self.tokenizer: Tokenizer = service.engine.tokenizer
        self.returns_token_ids = bool(fields.return_token_ids)
        self.prompt_logprobs_wanted = fields.prompt_logprobs
        self.shows_answer = fields.max_tokens != 0
        self.echoed = echoed
        """The prompts' text, if the answer begins with it."""

    def logprobs(self) -> CompletionLogprobs | None:
        """What turns one choice's logprobs into the shape clients know; None if none were asked for."""
        if self.params.logprobs is None:
            return None
        return CompletionLogprobs(
            self.tokenizer, self.params.logprobs, skip_special_tokens=self.params.skip_special_tokens
        )

    def usage(self, usages: Sequence[Usage]) -> dict[str, object]:
        if not self.shows_answer:
            usages = [Usage(usage.prompt_tokens, 0, usage.cached_tokens) for usage in usages]
        return usage_object(usages)

    def finish_reason(self, reason: str) -> str:
        return reason if self.shows_answer or reason == "timeout" else "length"

    async def whole(self, outputs: Sequence[RequestOutput]) -> web.Response:
        echoed_tokens = 0 if self.echoed is None else sum(map(len, self.prompt_ids)) * self.params.n
        if cost_of_answer(self.params, outputs, echoed_tokens) > MAX_INLINE_LOGPROBS:
            return json_response(await anyio.to_thread.run_sync(self._json, outputs))
        return json_response(self._json(outputs))

    def _json(self, outputs: Sequence[RequestOutput]) -> bytes:
        made = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [
                # One at a time, since orjson keeps the interpreter lock.
                orjson.Fragment(orjson.dumps(self._choice(prompt_index, output, choice)))
                for prompt_index, output in enumerate(outputs)
                for choice in output.choices
            ],
            "usage": self.usage([output.usage for output in outputs]),
        }
        return orjson.dumps(made)

    def _choice(self, prompt_index: int, output: RequestOutput, choice: ChoiceOutput) -> dict[str, Any]:
        text, token_ids, entries = choice.text, choice.token_ids, choice.logprobs or ()
        if not self.shows_answer:
            text, token_ids, entries = "", (), ()
        parts = []
        logprobs = self.logprobs()
        if self.echoed is not None:
            echo = self.echoed[prompt_index]
            text = echo + text
            if logprobs is not None:
                parts.append(logprobs.of_prompt(output.prompt_token_ids, output.prompt_logprobs or (), echo))
        if logprobs is not None:
            parts.append(logprobs.of_tokens(entries))
        made: dict[str, Any] = {
            "index": prompt_index * self.params.n + choice.index,
            "text": text,
            "logprobs": None if logprobs is None else joined(parts),
            "finish_reason": self.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason if self.shows_answer else None,
        }
        if self.prompt_logprobs_wanted is not None:
            of_prompt = output.prompt_logprobs or ()
            made["prompt_logprobs"] = prompt_logprobs(self.tokenizer, of_prompt, self.prompt_logprobs_wanted)
        if self.returns_token_ids:
            made |= {"token_ids": token_ids, "prompt_token_ids": output.prompt_token_ids}
        return made


class CompletionEventEncoder:
    """Deltas to events. The constant parts are encoded once; a plain delta costs one call of orjson."""

    def __init__(self, answer: CompletionAnswer, usage: UsageInStream) -> None:
        self._answer = answer
        self._usage = usage
        self._completion_tokens = 0
        head = {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": answer.model,
        }
        self._head = b"data: " + orjson.dumps(head)[:-1]
        self._usage_null = b"" if usage is UsageInStream.NEVER else b',"usage":null'
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._choices = answer.params.n * len(answer.prompt_ids)
        self._plain_heads = [self._head + b',"choices":[{"index":%d,"text":' % index for index in range(self._choices)]
        self._logprobs = [answer.logprobs() for _ in range(self._choices)]
        self._begun = [False] * self._choices
        self._is_plain = (
            answer.params.logprobs is None
            and not answer.returns_token_ids
            and answer.shows_answer
            and usage is not UsageInStream.ALWAYS
        )
        self._usages: list[Usage] = []
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}
        self._early: dict[int, list[OutputDelta]] = {}
        """Deltas of choices that came before choice 0, which brings the prompt's logprobs that they echo."""

    def takes_long(self, prompt_index: int) -> bool:
        """Whether choices that repeat a long prompt may begin now, which is better done on a worker thread."""
        answer = self._answer
        if answer.echoed is None:
            return False
        tokens = len(answer.prompt_ids[prompt_index])
        logprobs = answer.params.logprobs
        cost = tokens // TOKENS_LIKE_A_LOGPROB if logprobs is None else tokens * (2 + logprobs)
        first = prompt_index * answer.params.n
        return cost * self._begun[first : first + answer.params.n].count(False) > MAX_INLINE_LOGPROBS

    def encode(self, prompt_index: int, batch: list[OutputDelta]) -> bytes:
        """All events of what one wake-up brought."""
        parts: list[bytes] = []
        if self._answer.echoed is not None and self._answer.params.logprobs is not None:
            batch = self._after_prompt_logprobs(prompt_index, batch)
        for delta in batch:
            index = prompt_index * self._answer.params.n + delta.index
            if not self._begun[index]:
                self._begun[index] = True
                self._begin(parts, prompt_index, index)
            if delta.finish_reason is not None or not self._is_plain:
                self._rich_event(parts, index, delta)
            elif delta.text:
                parts += (self._plain_heads[index], orjson.dumps(delta.text), self._plain_tail)
            if delta.usage is not None:
                self._usages.append(delta.usage)
                if self._usage is not UsageInStream.NEVER and len(self._usages) == len(self._answer.prompt_ids):
                    usage = orjson.dumps(self._answer.usage(self._usages))
                    parts += (self._head, b',"choices":[],"usage":', usage, b"}\n\n")
        return b"".join(parts)

    def _after_prompt_logprobs(self, prompt_index: int, batch: list[OutputDelta]) -> list[OutputDelta]:
        if prompt_index in self._prompt_logprobs:
            return batch
        waiting = self._early.setdefault(prompt_index, [])
        waiting += batch
        for delta in waiting:
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs[prompt_index] = delta.prompt_logprobs
                return self._early.pop(prompt_index)
            if delta.index == 0:
                # Ended before its prompt was computed.
                self._prompt_logprobs[prompt_index] = ()
                return self._early.pop(prompt_index)
        return []

    def _begin(self, parts: list[bytes], prompt_index: int, index: int) -> None:
        answer = self._answer
        choice: dict[str, Any] = {}
        if answer.echoed is not None:
            choice["text"] = answer.echoed[prompt_index]
            logprobs = self._logprobs[index]
            if logprobs is not None:
                entries = self._prompt_logprobs[prompt_index]
                tokens = answer.prompt_ids[prompt_index] if entries else ()
                choice["logprobs"] = joined([logprobs.of_prompt(tokens, entries, choice["text"])])
        if answer.returns_token_ids:
            choice |= {"prompt_token_ids": answer.prompt_ids[prompt_index], "token_ids": ()}
        if choice:
            parts.append(self._event({"index": index, "text": "", **choice}))

    def _rich_event(self, parts: list[bytes], index: int, delta: OutputDelta) -> None:
        answer = self._answer
        choice: dict[str, Any] = {"index": index, "text": delta.text if answer.shows_answer else ""}
        self._completion_tokens += len(delta.token_ids) if answer.shows_answer else 0
        shows_tokens = bool(delta.token_ids) and answer.shows_answer
        logprobs = self._logprobs[index]
        if shows_tokens and logprobs is not None:
            choice["logprobs"] = joined([logprobs.of_tokens(delta.logprobs or ())])
        if shows_tokens and answer.returns_token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.finish_reason is not None:
            choice["finish_reason"] = answer.finish_reason(delta.finish_reason)
            choice["stop_reason"] = delta.stop_reason if answer.shows_answer else None
        elif not (choice["text"] or shows_tokens):
            return
        parts.append(self._event(choice))

    def _event(self, choice: dict[str, Any]) -> bytes:
        choices = orjson.dumps([{"logprobs": None, "finish_reason": None, **choice}])
        usage = self._usage_null
        if self._usage is UsageInStream.ALWAYS:
            so_far = Usage(sum(map(len, self._answer.prompt_ids)), self._completion_tokens)
            usage = b',"usage":' + orjson.dumps(usage_object([so_far]))
        return self._head + b',"choices":' + choices + usage + b"}\n\n"
