"""Chat messages as clients send them, made into what a chat template reads, and into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from metrale_async.api.limits import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TEMPLATE_VARIABLES,
    MAX_TOOL_CALLS,
)
from metrale_async.api.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    TokenizeChatRequest,
    ToolCall,
)
from metrale_async.errors import InvalidRequestError
from metrale_async.text import Tokenizer

ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
"""Role in a request, and the role templates know for it."""

_RESERVED_VARIABLES: Final = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"}
)


async def encode_messages(
    tokenizer: Tokenizer, request: ChatCompletionRequest | TokenizeChatRequest, messages: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Token ids of the rendered chat; ``messages`` are the request's own, from :func:`template_messages`.
    Raises InvalidRequestError naming the field."""
    variables = request.chat_template_kwargs or {}
    if len(variables) > MAX_TEMPLATE_VARIABLES:
        raise InvalidRequestError(
            f"chat_template_kwargs holds {len(variables)} names; allowed: up to {MAX_TEMPLATE_VARIABLES}",
            param="chat_template_kwargs",
        )
    reserved = sorted(_RESERVED_VARIABLES & variables.keys())
    if reserved:
        raise InvalidRequestError(
            f"chat_template_kwargs holds {reserved[0]}, which the server sets", param="chat_template_kwargs"
        )
    continues = bool(request.continue_final_message)
    generates = request.add_generation_prompt
    return await tokenizer.encode_chat_async(
        messages,
        # Asking to continue says all there is to say, unless a prompt is explicitly wanted too.
        add_generation_prompt=not continues if generates is None else generates,
        continue_final_message=continues,
        variables=variables,
        add_special_tokens=bool(request.add_special_tokens),
    )


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Raises InvalidRequestError naming the message."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequestError(f"messages holds {len(messages)}; allowed: 1 to {MAX_MESSAGES}", param="messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, path: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    made: dict[str, Any] = {"role": role, "content": _content(message, path)}
    for name in ("name", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            if len(value) > MAX_NAME_CHARS:
                raise InvalidRequestError(
                    f"{path}.{name} has {len(value)} characters; allowed: up to {MAX_NAME_CHARS}",
                    param=f"{path}.{name}",
                )
            made[name] = value
    if message.tool_calls:
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            raise InvalidRequestError(
                f"{path}.tool_calls holds {len(message.tool_calls)}; allowed: up to {MAX_TOOL_CALLS}",
                param=f"{path}.tool_calls",
            )
        made["tool_calls"] = [
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ]
    return made


def _content(message: ChatMessage, path: str) -> str | list[dict[str, str]]:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            # Of an answer that was nothing but tool calls; templates print a missing text as "None".
            return ""
        raise InvalidRequestError(f"{path}.content is missing", param=f"{path}.content")
    if len(content) > MAX_CONTENT_PARTS:
        raise InvalidRequestError(
            f"{path}.content holds {len(content)} parts; allowed: up to {MAX_CONTENT_PARTS}", param=f"{path}.content"
        )
    return [_text_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]


def _text_part(part: ContentPart, path: str) -> dict[str, str]:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "refusal"):
        raise InvalidRequestError(
            f"{path}.type is {part.type[:40]!r}; this model reads text only", param=path, code="unsupported_parameter"
        )
    if text is None:
        raise InvalidRequestError(f"{path}.text is missing", param=path)
    return {"type": "text", "text": text}


def _tool_call(call: ToolCall, path: str) -> dict[str, Any]:
    """Templates read the arguments as an object; clients send back the JSON text that they received."""
    for name, value in (("function.name", call.function.name), ("id", call.id), ("type", call.type)):
        if value is not None and len(value) > MAX_NAME_CHARS:
            raise InvalidRequestError(
                f"{path}.{name} has {len(value)} characters; allowed: up to {MAX_NAME_CHARS}", param=f"{path}.{name}"
            )
    arguments = call.function.arguments
    if isinstance(arguments, str) and arguments:
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise InvalidRequestError(f"{path}.function.arguments is not JSON: {error}", param=path) from error
    if arguments is not None and arguments != "" and not isinstance(arguments, dict):
        raise InvalidRequestError(f"{path}.function.arguments must hold a JSON object", param=path)
    return {
        "id": call.id,
        "type": call.type or "function",
        "function": {"name": call.function.name, "arguments": arguments or {}},
    }
