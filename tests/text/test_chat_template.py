"""Templates render as transformers renders them, refuse what they refuse, and are bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from metrale_async.errors import CheckpointError, InvalidRequestError
from metrale_async.models.gguf_file import GgufFile
from metrale_async.text import ChatTemplate, Tokenizer
from metrale_async.text import chat_template as module
from metrale_async.text.control_tokens import MARK
from tests.text.awkward_strings import AWKWARD_STRINGS

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """{{ bos_token }}
{%- if tools is not none %}
    {{- '<|tools|>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- set content = message['content'] | trim %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
{% else %}{% continue %}{% endif %}{% endfor %}"""
PARTS = """{% for message in messages %}{{ message.role }}:
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}
{% endfor %}"""
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {{- tool_call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MACROS = """{%- macro shown(content, depth=0) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content if item.type == 'text' %}{{- item.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages if message.role != 'hidden' recursive %}
    {{- loop.index }}/{{ loop.length }}:{{ shown(message.content) }}{{ loop(message.more) if message.more }}
    {%- call(extra) wrapped() %}<{{ extra }}>{% endcall %}
{%- endfor %}
{%- macro wrapped() %}{{ caller('x') }}{% endmacro %}""".replace(
    "{%- call(extra) wrapped() %}<{{ extra }}>{% endcall %}", ""
)
NAMESPACE = """{% set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}
{{ m.role }}|{{ m.content.split('x')[-1] | upper }}|{{ flag | default('none') }}
{%- if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"""
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "parts": PARTS,
    "namespace": NAMESPACE,
    "qwen": QWEN,
    "macros": MACROS,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, None, "é & ü"]}}}
CHATS = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
    "tools": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "<think>hm</think>\n\nlet me see",
            "tool_calls": [{"type": "function", "function": {"name": "größe", "arguments": {"a": "<é>", "b": [1.5]}}}],
        },
        {"role": "user", "content": "and?"},
        {"role": "tool", "content": "{}"},
    ],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_render_as_in_transformers(name: str, chat: str, tools: Any, prompt: bool) -> None:
    source = TEMPLATES[name]
    ours = ChatTemplate(source, SPECIAL).render(
        CHATS[chat], tools=tools, add_generation_prompt=prompt, variables={"flag": "on"}
    )
    theirs, _ = render_jinja_template(
        [CHATS[chat]], tools=tools, chat_template=source, add_generation_prompt=prompt, flag="on", **SPECIAL
    )
    assert ours == theirs[0]


def test_smollm2_and_tiny_hybrid_render_as_in_transformers(smollm2_gguf: Path, tiny_hybrid: Path) -> None:
    for tokenizer in (
        Tokenizer.from_gguf_metadata(GgufFile(smollm2_gguf).metadata),
        Tokenizer.from_directory(tiny_hybrid),
    ):
        template = tokenizer.chat_template
        assert template is not None
        for text in AWKWARD_STRINGS:
            chat = [{"role": "system", "content": text}, {"role": "user", "content": text}]
            theirs, _ = render_jinja_template([chat], chat_template=template.source, add_generation_prompt=True)
            assert template.render(chat) == theirs[0]


PART_TEMPLATES = {
    "loop": "{% for m in messages %}{% for part in m['content'] %}[{{ part.text }}]{% endfor %}{% endfor %}",
    "attribute": "{% for m in messages %}{% for part in m.content %}[{{ part['text'] }}]{% endfor %}{% endfor %}",
    "variable": "{% set c = messages[0].content %}{% for part in c[0:] %}[{{ part.text }}]{% endfor %}",
    "filter": "{% for p in messages[0].content | selectattr('type', 'equalto', 'text') %}[{{ p.text }}]{% endfor %}",
    "macro": "{% macro f(x) %}{% for p in x %}[{{ p.text }}]{% endfor %}{% endmacro %}{{ f(messages[0].content) }}",
}
TEXT_TEMPLATES = {
    "plain": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "split": "{% for m in messages %}{% for line in m.content.split('\n') %}{{ line }};{% endfor %}{% endfor %}",
    "variable": "{% set c = messages[0].content %}{% for line in c.split('\n') %}{{ line }};{% endfor %}",
}
PARTS_AB: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]


@pytest.mark.parametrize("name", PART_TEMPLATES)
def test_a_template_that_reads_parts_gets_parts(name: str) -> None:
    template = ChatTemplate(PART_TEMPLATES[name], {})
    assert template.render(PARTS_AB) == "[a][b]"
    assert template.render([{"role": "user", "content": "a"}]) == "[a]"


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_a_template_that_reads_text_gets_the_parts_joined_by_newlines(name: str) -> None:
    assert ChatTemplate(TEXT_TEMPLATES[name], {}).render(PARTS_AB).replace(";", "\n").strip() == "a\nb"


def test_a_template_that_reads_both_gets_what_was_sent() -> None:
    template = ChatTemplate(PARTS, {})
    assert "[a][b]" in template.render(PARTS_AB)
    assert "user:a" in template.render([{"role": "user", "content": "a"}])


def test_parts_that_are_no_text_are_refused() -> None:
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(InvalidRequestError, match="type text"):
        ChatTemplate(CHATML, {}).render(picture)


@pytest.mark.parametrize("name", ["chatml", "llama", "mistral", "parts"])
@pytest.mark.parametrize("text", ["Well,", "Well, ", " Well,\n", "a\n\nb  "])
def test_the_final_message_is_continued_as_in_transformers(name: str, text: str) -> None:
    chat = [{"role": "user", "content": "hi Well, "}, {"role": "assistant", "content": text}]
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(chat, add_generation_prompt=False, continue_final_message=True)
    theirs, _ = render_jinja_template([chat], chat_template=TEMPLATES[name], continue_final_message=True, **SPECIAL)
    assert ours == theirs[0]


def test_a_message_that_cannot_be_continued_is_refused() -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        ChatTemplate(CHATML, {}).render(chat, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        ChatTemplate("{{ messages[-1].content[0] }}", {}).render(
            chat, add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(InvalidRequestError, match="last message with text"):
        ChatTemplate(CHATML, {}).render([], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        MISTRAL,
        "{{ messages[0]['missing'].upper() }}",
        "{{ 1 / 0 }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ 'x' * 10000000 }}",
        "{{ 10000000 * [1] }}",
        "{{ 2 ** 10000000000 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages | tojson(cls=range) }}",
    ],
)
def test_what_a_template_refuses_or_the_sandbox_forbids_names_the_messages(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template") as error:
        ChatTemplate(source, SPECIAL).render([{"role": "assistant", "content": "x"}])
    assert error.value.param == "messages"


def test_output_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RENDERED_CHARS", 100)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert len(template.render([{"content": "x" * 100}])) == 100
    with pytest.raises(InvalidRequestError, match="longer than 100"):
        template.render([{"content": "x" * 101}])


@pytest.mark.parametrize(
    ("source", "spent"),
    [
        ("{% for i in range(10) %}{% for j in range(10) %}{% endfor %}{% endfor %}", 110),
        ("{% for i in range(100) if false %}{% endfor %}", 100),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(5) }}", 63),
        ("{% for x in [[[], []]] recursive %}{{ loop(x) }}{% endfor %}", 3),
        ("{% generation %}{% for i in range(7) %}{% continue %}{% endfor %}{% endgeneration %}", 7),
    ],
)
def test_loops_and_macros_are_counted(source: str, spent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(source, {})
    for limit in (spent + 1, spent):
        monkeypatch.setattr(module, "MAX_ITERATIONS", limit)
        template.render([{"role": "user", "content": "x"}])
    monkeypatch.setattr(module, "MAX_ITERATIONS", spent - 1)
    with pytest.raises(InvalidRequestError, match=f"more than {spent - 1} iterations") as error:
        template.render([{"role": "user", "content": "x"}])
    assert error.value.param == "messages"


def test_repetition_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PRODUCT_CHARS", 100)
    assert ChatTemplate("{{ 'ab' * 50 }}{{ 3 * 4 }}{{ 2 ** 3 }}", {}).render([{}]) == "ab" * 50 + "128"
    with pytest.raises(InvalidRequestError, match="repetition"):
        ChatTemplate("{{ 'ab' * 51 }}", {}).render([{}])
    with pytest.raises(InvalidRequestError, match="exponent"):
        ChatTemplate("{{ 2 ** 101 }}", {}).render([{}])


def test_what_a_template_sets_within_a_generation_stays_there_as_in_transformers() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    theirs, _ = render_jinja_template([[{"role": "user", "content": ""}]], chat_template=source)
    assert ChatTemplate(source, {}).render([{"role": "user", "content": ""}]) == theirs[0] == "21"


def test_json_of_a_template_keeps_marks_when_it_escapes_everything_else() -> None:
    chat = [{"role": "user", "content": f"é{MARK}"}]
    assert ChatTemplate("{{ messages[0].content | tojson(ensure_ascii=true) }}", {}).render(chat) == f'"\\u00e9{MARK}"'


def test_a_template_that_does_not_compile_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}", {})
