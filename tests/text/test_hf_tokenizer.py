"""What the files beside tokenizer.json add to it, against transformers where it reads them too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from metrale_async.errors import CheckpointError, InvalidRequestError
from metrale_async.text import Tokenizer
from tests.support.scripted_engine import write_byte_tokenizer
from tests.text.awkward_strings import AWKWARD_STRINGS


def write(directory: Path, **config: Any) -> Path:
    write_byte_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **config})
    )
    return directory


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"bos_token": "<|end|>", "add_bos_token": True},
        {"bos_token": "<|end|>", "add_bos_token": False, "add_eos_token": True},
        {"bos_token": "<s>", "add_bos_token": True, "added_tokens_decoder": {"257": {"content": "<s>"}}},
        {
            "added_tokens_decoder": {
                "256": {"content": "<|end|>", "special": True},
                "257": {"content": "<tool>", "special": False},
                "258": {"content": "<s>", "special": True},
            }
        },
    ],
)
def test_a_directory_reads_as_in_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    ours = Tokenizer.from_directory(write(tmp_path, **config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*AWKWARD_STRINGS, "a<tool>b<s>c<|end|>"]:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected, repr(text)
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert ours.special_token_ids == set(theirs.all_special_ids) | {
        index for index, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"300": {"content": "<s>"}}}, "adds token 300"),
        ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, "unreadable entry 'x'"),
        ({"added_tokens_decoder": [1]}, "not an object"),
        ({"eos_token": "<missing>"}, "eos_token is '<missing>'"),
        ({"chat_template": [{"name": "a"}]}, "chat_template in tokenizer_config.json"),
        ({"chat_template": "{% if %}"}, "does not compile"),
    ],
)
def test_files_that_contradict_each_other_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_directory(write(tmp_path, **config))


async def test_the_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = Tokenizer.from_directory(write(tmp_path, chat_template=named))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(await tokenizer.encode_chat_async(chat)) == "plain"
    assert tokenizer.decode(await tokenizer.encode_chat_async(chat, tools=[{}, {}])) == "2 tools"


async def test_template_files_go_before_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, chat_template="from the configuration")
    (tmp_path / "chat_template.jinja").write_text("from the file é")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    tokenizer = Tokenizer.from_directory(tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(await tokenizer.encode_chat_async(chat)) == "from the file é"
    assert tokenizer.decode(await tokenizer.encode_chat_async(chat, tools=[{}])) == "for tools"


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write(tmp_path))
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequestError, match="no chat template") as error:
        await tokenizer.encode_chat_async([{"role": "user", "content": "hi"}])
    assert error.value.param == "messages"


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_directory(tmp_path)
