"""The bodies of requests: the fields this server honours. Null is the same as absent."""

from __future__ import annotations

import enum
import re
from typing import Any, TypeVar

import msgspec

from metrale_async.api.fields import check_fields
from metrale_async.errors import InvalidRequestError

_PATH = re.compile(r" - at `(key in )?\$\.?(?P<path>.*)`$")


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None


# Nothing in a body refers back to what holds it, so the cycle collector need not look at its many small parts.


class ContentPart(msgspec.Struct, kw_only=True, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True, gc=False):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, gc=False):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, gc=False):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeTextRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize with messages."""

    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


Schema = TypeVar("Schema", bound=msgspec.Struct)


def read_fields(body: dict[str, Any], schema: type[Schema]) -> tuple[Schema, list[str]]:
    """The body as ``schema``, and the names of the fields nobody knows. Raises InvalidRequestError naming the field."""
    unknown = check_fields(body, schema.__struct_fields__)
    try:
        return msgspec.convert(body, schema), unknown
    except msgspec.ValidationError as error:
        raise _refusal(error) from error


class UsageInStream(enum.Enum):
    """Which events of a stream tell the usage."""

    NEVER = enum.auto()
    AT_THE_END = enum.auto()
    ALWAYS = enum.auto()
    """At the end, and in every event what has come about so far."""


def check_stream_options(fields: GenerationFields) -> UsageInStream:
    """Raises InvalidRequestError."""
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequestError("prompt_logprobs goes with stream false only", param="prompt_logprobs")
    options = fields.stream_options
    if options is None:
        return UsageInStream.NEVER
    if not fields.stream:
        raise InvalidRequestError("stream_options goes with stream true only", param="stream_options")
    if not options.include_usage:
        if options.continuous_usage_stats:
            raise InvalidRequestError(
                "stream_options.continuous_usage_stats goes with include_usage true only",
                param="stream_options.continuous_usage_stats",
            )
        return UsageInStream.NEVER
    return UsageInStream.ALWAYS if options.continuous_usage_stats else UsageInStream.AT_THE_END


def _refusal(error: msgspec.ValidationError) -> InvalidRequestError:
    message = str(error)
    found = _PATH.search(message)
    if found is None:
        # "Object missing required field `prompt`", of the body itself.
        names = re.findall(r"`(\w+)`", message)
        return InvalidRequestError(message, param=names[0] if names else None, code="missing_required_parameter")
    path = found["path"].replace("[...]", "")
    return InvalidRequestError(f"{path}: {message[: found.start()]}", param=path, code="invalid_type")
