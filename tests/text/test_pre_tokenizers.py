"""Words are cut as another regular-expression engine cuts them, and as transformers' own tokenizers do."""

from __future__ import annotations

import unicodedata

import pytest
import regex
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2 import tokenization_qwen2
from transformers.models.qwen3_5 import tokenization_qwen3_5

from metrale_async.text.byte_table import byte_level_alphabet
from metrale_async.text.pre_tokenizers import _DEEPSEEK_LETTERS, WORDS_BY_PRE
from tests.text.awkward_strings import AWKWARD_STRINGS

ALPHABET = byte_level_alphabet()


def words(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    pieces = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
    return [bytes(ALPHABET[character] for character in piece).decode() for piece in pieces]


def cut(text: str, pattern: str) -> list[str]:
    """What matches and what lies between matches, in order."""
    pieces, position = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[position : match.start()], match[0]]
        position = match.end()
    return [piece for piece in [*pieces, text[position:]] if piece]


@pytest.mark.parametrize("pre", sorted(WORDS_BY_PRE))
def test_words_are_cut_as_another_engine_cuts_them(pre: str) -> None:
    for text in AWKWARD_STRINGS:
        pieces = [text] if text else []
        for pattern in WORDS_BY_PRE[pre].patterns:
            pieces = [part for piece in pieces for part in cut(piece, pattern)]
        assert words(WORDS_BY_PRE[pre].pre_tokenizer(), text) == pieces, repr(text)


@pytest.mark.parametrize(
    ("pre", "theirs"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)),
        (
            "smollm",
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            ),
        ),
        *(
            (
                pre,
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                ),
            )
            for pre, pattern in (
                ("qwen2", tokenization_qwen2.PRETOKENIZE_REGEX),
                ("qwen35", tokenization_qwen3_5.PRETOKENIZE_REGEX),
            )
        ),
    ],
)
def test_words_are_cut_as_the_models_own_tokenizer_json_cuts_them(
    pre: str, theirs: pre_tokenizers.PreTokenizer
) -> None:
    for text in AWKWARD_STRINGS:
        assert words(WORDS_BY_PRE[pre].pre_tokenizer(), text) == words(theirs, text), repr(text)


def test_the_letters_of_deepseek_llm_are_cased_letters() -> None:
    letters = regex.compile(f"[{_DEEPSEEK_LETTERS}]")
    cased = [chr(code) for code in range(0x110000) if letters.match(chr(code))]
    assert len(cased) > 2000
    # U+1FBE, U+2126 and U+212A are what normalisation would replace.
    assert {"\u1f7d", "\u1fd3", "\u1fdb", "\u1fbe", "\u2126", "\u212a"} <= set(cased)
    assert {unicodedata.category(character) for character in cased} <= {"Lu", "Ll", "Lt", "Cn"}


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "in 2026\r\n", ["in", " ", "2", "0", "2", "6", "\r\n"]),
        ("gpt-2", "in 2026\r\n", ["in", " 2026", "\r\n"]),
        ("llama-bpe", "in 20261'S", ["in", " ", "202", "61", "'S"]),
        ("qwen2", "in 20'S", ["in", " ", "2", "0", "'S"]),
        ("tekken", "camelCase'S 12", ["camel", "Case", "'S", " ", "1", "2"]),
        ("gpt-4o", "camelCase'S 1234", ["camel", "Case'S", " ", "123", "4"]),
        ("deepseek-llm", "in 12\n你好a", ["in", " ", "1", "2", "\n", "你好", "a"]),
        ("deepseek-coder", "in 12\n你好a", ["in", " ", "1", "2", "\n", "你好", "a"]),
        ("deepseek-v3", "in 1234 .map", ["in", " ", "123", "4", " .", "map"]),
        ("default", "a 12345.", ["a", " ", "123", "45", "."]),
    ],
)
def test_words_of_some_texts(pre: str, text: str, expected: list[str]) -> None:
    assert words(WORDS_BY_PRE[pre].pre_tokenizer(), text) == expected
