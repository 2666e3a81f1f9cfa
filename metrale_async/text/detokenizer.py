"""Tokens to text, one at a time: whole characters only, and joined exactly what decoding all tokens at once gives."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metrale_async.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns each token into its bytes by table and those into text by an incremental UTF-8 decoder, which keeps an
    incomplete character back until it is whole. Bytes that can never become one read U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._bytes_of = tokenizer.bytes_to_decode
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decode = _utf8_decoder(errors="replace").decode

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; often empty within a character."""
        if token_id in self._skip:
            return ""
        return self._decode(self._bytes_of(token_id))

    def flush(self) -> str:
        """The text ends here: an incomplete character reads U+FFFD."""
        return self._decode(b"", True)
