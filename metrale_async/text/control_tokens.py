"""Tokens that steer a model rather than stand for text, and how text from clients is kept from becoming them.

A chat template writes the control tokens of a turn as text, so its output is encoded with their text understood. What
a client put into a message must not be: ``<|im_end|>`` in a question is a question about it, not the end of the turn.
Such text is broken up by a mark before the template sees it. The tokenizer looks for control tokens in the text as it
is, and its first normalisation step takes the marks out again, so that the pieces are tokenized as if nothing had been
there. Text without control tokens in it is never touched.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from metrale_async.errors import InvalidRequestError

MARK: Final = "\ufdd0\ufdef\ufdd1"
"""Three code points that Unicode reserves for internal use and no text contains."""


def with_marks_removed(library: LibraryTokenizer) -> LibraryTokenizer:
    """``library``, made to take marks out of the text; every control token is found before that."""
    tokens: Collection[AddedToken] = library.get_added_tokens_decoder().values()
    if any(token.special and token.normalized for token in tokens):
        # These are looked for only after normalisation, and the library does not change a token it knows.
        content = json.loads(library.to_str())
        for token in content["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        library = LibraryTokenizer.from_str(json.dumps(content, ensure_ascii=False))
    removal = normalizers.Replace(MARK, "")
    known = library.normalizer
    library.normalizer = normalizers.Sequence([removal] if known is None else [removal, known])
    return library


def broken_up(value: Any, control_texts: Collection[str], *, param: str) -> Any:
    """``value`` (text, or any JSON of texts) with a mark inside every control token's text; each has two characters
    or more.

    Raises InvalidRequestError naming ``param`` for text that contains the mark itself.
    """
    if isinstance(value, str):
        if MARK in value:
            raise InvalidRequestError("the text holds code points that are reserved for internal use", param=param)
        for text in control_texts:
            # Again and again: an occurrence may begin inside the one before it.
            while text in value:
                value = value.replace(text, text[0] + MARK + text[1:])
        return value
    if isinstance(value, Mapping):
        return {
            broken_up(key, control_texts, param=param): broken_up(item, control_texts, param=param)
            for key, item in value.items()
        }
    if isinstance(value, Sequence):
        return [broken_up(item, control_texts, param=param) for item in value]
    return value
