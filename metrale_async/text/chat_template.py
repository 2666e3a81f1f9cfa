"""Chat messages to prompt text, by the template that comes with the model.

Templates are code from a checkpoint: they run in jinja2's immutable sandbox, with the extensions, filters and globals
that ``transformers`` gives them, and what they produce is bounded. Rendering is CPU work of unknown length: callers
run it on a worker thread.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from metrale_async.errors import CheckpointError, InvalidRequestError

MAX_RENDERED_CHARS: Final = 16 * 2**20
"""A prompt longer than this is refused while it is being rendered."""

Message = Mapping[str, Any]


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateRefusedError(jinja2.TemplateError):
    """The template itself refused the messages (``raise_exception``)."""


def _raise_exception(message: str) -> None:
    raise TemplateRefusedError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """JSON without jinja2's HTML escaping, as templates expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token`` ... to their text. Raises CheckpointError for a broken
        template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._wants_parts = _iterates_over_content(environment, source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. ``variables`` are passed to the template as they are (``chat_template_kwargs``).

        Raises InvalidRequestError naming ``messages`` when the template refuses them or produces too much.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message goes with add_generation_prompt false", param="continue_final_message"
            )
        if continue_final_message and (not messages or not isinstance(messages[-1].get("content"), str)):
            raise InvalidRequestError("continue_final_message needs a last message with text", param="messages")
        shown = list(messages) if self._wants_parts else [_with_text_content(message) for message in messages]
        context = {
            **self._special_tokens,
            **(variables or {}),
            "messages": shown,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = _bounded_join(self._template.generate(context))
        except InvalidRequestError:
            raise
        except TemplateRefusedError as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", param="messages") from error
        except Exception as error:
            # A template is foreign code fed with foreign data: whatever it raises is about these messages.
            raise InvalidRequestError(
                f"the chat template cannot render the messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        if continue_final_message:
            rendered = _cut_after(rendered, messages[-1]["content"])
        return rendered


def _bounded_join(pieces: Iterable[str]) -> str:
    kept, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARS:
            raise InvalidRequestError(
                f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters", param="messages"
            )
        kept.append(piece)
    return "".join(kept)


def _cut_after(rendered: str, final: str) -> str:
    """Everything up to the end of the last message's text, without the template's end of turn."""
    text = final.strip()
    position = rendered.rfind(text)
    if position < 0:
        raise InvalidRequestError(
            "the chat template changes the last message, so it cannot be continued", param="messages"
        )
    return rendered[: position + len(text)]


def _with_text_content(message: Message) -> Message:
    """Content given as a list of text parts, joined by newlines for templates that expect a string."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise InvalidRequestError(
                "this model reads text only: content parts must be of type text", param="messages"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _iterates_over_content(environment: jinja2.Environment, source: str) -> bool:
    """Whether the template itself handles content given as a list (``{% for part in message['content'] %}``)."""
    for loop in environment.parse(source).find_all(nodes.For):
        for access in (loop.iter, *loop.iter.find_all((nodes.Getitem, nodes.Getattr))):
            if isinstance(access, nodes.Getattr) and access.attr == "content":
                return True
            if isinstance(access, nodes.Getitem) and getattr(access.arg, "value", None) == "content":
                return True
    return False
