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
NAMESPACE = """{% set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{% endif %}
{{ m.role }}|{{ m.content.split('x')[-1] | upper }}|{{ flag | default('none') }}
{%- if loop.last %}{% break %}{% endif %}{% endfor %}{{ ns.n }}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "parts": PARTS, "namespace": NAMESPACE}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "größe", "parameters": {"a<b": [1, None, "é & ü"]}}}
CHATS = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": " a\n"},
        {"role": "assistant", "content": "b <|im_end|>"},
        {"role": "user", "content": "{{ 7 * 7 }} {% raw %}"},
    ],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_render_as_in_transformers(name: str, chat: str, tools: Any, prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(
        CHATS[chat], tools=tools, add_generation_prompt=prompt, variables={"flag": "on"}
    )
    theirs, _ = render_jinja_template(
        [CHATS[chat]],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=prompt,
        flag="on",
        **SPECIAL,
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


def test_a_list_of_text_parts_becomes_text_for_templates_that_expect_it() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert "user\na\nb<|im_end|>" in ChatTemplate(CHATML, {}).render(chat)
    assert "[a][b]" in ChatTemplate(PARTS, {}).render(chat)
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


def test_a_template_that_does_not_compile_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% if %}", {})
