"""Chat messages to prompt text, by the template that comes with the model.

Templates are code from a checkpoint: they run in jinja2's immutable sandbox, with the extensions, filters and globals
that ``transformers`` gives them, and what they produce is bounded. Rendering is CPU work of unknown length: callers
run it on a worker thread.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence, Set, Sized
from typing import Any, Final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from metrale_async.errors import CheckpointError, InvalidRequestError
from metrale_async.text.control_tokens import MARK

MAX_RENDERED_CHARS: Final = 16 * 2**20
"""A prompt longer than this is refused while it is being rendered."""
MAX_ITERATIONS: Final = 1_000_000
"""Loop bodies and macros that one rendering may run, about a second's work: most templates run a few per message."""
MAX_PRODUCT_CHARS: Final = 2**20
"""Longest text or list that a template may make by repetition, and the largest exponent of a power."""

Message = Mapping[str, Any]

_BUDGET_NAME: Final = "metrale_iteration_budget"
# Appended to a message that is to be continued; the space shows whether the template strips what it is given.
_CONTINUE_HERE: Final = "\ufdd2\ufdd3 "


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it just renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it this way)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateRefusedError(jinja2.TemplateError):
    """The template itself refused the messages (``raise_exception``)."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """The two operators by which a few characters of template make more than memory holds."""
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= MAX_PRODUCT_CHARS):
            raise jinja2.exceptions.SecurityError("the exponent is too large")
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, Sized) and isinstance(count, int) and len(repeated) * count > MAX_PRODUCT_CHARS:
                raise jinja2.exceptions.SecurityError(f"a repetition makes more than {MAX_PRODUCT_CHARS} characters")
        return super().call_binop(context, operator, left, right)


class _IterationBudget:
    """Called at the start of every loop body and macro of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_ITERATIONS

    def __call__(self) -> bool:
        self._left -= 1
        if self._left < 0:
            raise InvalidRequestError(
                f"the chat template runs more than {MAX_ITERATIONS} iterations for these messages", param="messages"
            )
        return True


def _raise_exception(message: str) -> None:
    raise TemplateRefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escaping, as templates expect."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace(_ESCAPED_MARK, MARK)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


_ESCAPED_MARK: Final = json.dumps(MARK)[1:-1]


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens``: ``bos_token``, ``eos_token`` ... to their text. Raises CheckpointError for a broken
        template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self._reads_parts, self._reads_text = iterates_over_content(tree), _tests_for_text(tree)
            _spend_budget(tree, environment)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error

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
        shown = [self._shown(message) for message in messages]
        if continue_final_message:
            final = _mark_end_of_last(shown)
        context = {
            "documents": None,
            **self._special_tokens,
            **(variables or {}),
            "messages": shown,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            _BUDGET_NAME: _IterationBudget(),
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
            rendered = _cut_at_mark(rendered, final)
        return rendered

    def _shown(self, message: Message) -> dict[str, Any]:
        """The content in the form that the template reads: text, or a list of parts."""
        content = message.get("content")
        if isinstance(content, list) and not self._reads_parts:
            content = "\n".join(_text_of(part) for part in content)
        elif isinstance(content, str) and self._reads_parts and not self._reads_text:
            content = [{"type": "text", "text": content}]
        else:
            return dict(message)
        return {**message, "content": content}


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


def _mark_end_of_last(messages: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text, which is returned as it was."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUE_HERE
        return content
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        text = _text_of(content[-1])
        messages[-1]["content"] = [*content[:-1], {**content[-1], "text": text + _CONTINUE_HERE}]
        return text
    raise InvalidRequestError("continue_final_message needs a last message with text", param="messages")


def _cut_at_mark(rendered: str, final: str) -> str:
    """Everything up to the end of the last message's text, without the template's end of turn."""
    position = rendered.rfind(_CONTINUE_HERE.strip())
    if position < 0 or final.strip() not in rendered:
        raise InvalidRequestError(
            "the chat template changes the last message, so it cannot be continued", param="messages"
        )
    continued = rendered[:position]
    # A template that strips its messages took the mark's space with it, and would have taken the text's, too.
    return continued if rendered.startswith(_CONTINUE_HERE, position) else continued.rstrip()


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise InvalidRequestError("this model reads text only: content parts must be of type text", param="messages")
    return text


def _spend_budget(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Have every loop body, loop filter and macro of a template call the rendering's iteration budget."""

    def spending() -> nodes.Call:
        return nodes.Call(nodes.Name(_BUDGET_NAME, "load"), [], [], None, None)

    loops, macros = list(tree.find_all(nodes.For)), list(tree.find_all(nodes.Macro))
    for loop in loops:
        loop.body.insert(0, nodes.ExprStmt(spending()))
        if loop.test is not None:
            loop.test = nodes.And(spending(), loop.test)
    for macro in macros:
        macro.body.insert(0, nodes.ExprStmt(spending()))
    tree.set_environment(environment)
    tree.set_lineno(1)


def iterates_over_content(tree: nodes.Template) -> bool:
    """Whether a template itself handles content given as a list (``{% for part in message['content'] %}``), also by
    way of a variable or of a macro's argument."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        known = len(names)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
                names.add(assignment.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                pairs = zip(macro.args, call.args, strict=False)
                names.update(parameter.name for parameter, value in pairs if _is_content(value, names))
        if len(names) == known:
            break
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: Set[str]) -> bool:
    match node:
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            if isinstance(node.arg, nodes.Slice):
                return _is_content(node.node, names)
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Filter():
            return _is_content(node.node, names)
    return False


def _tests_for_text(tree: nodes.Template) -> bool:
    """Whether a template asks what kind of content it has (``content is string``)."""
    return any(test.name in ("string", "iterable", "sequence", "mapping") for test in tree.find_all(nodes.Test))
