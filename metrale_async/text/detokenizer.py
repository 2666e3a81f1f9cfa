"""Tokens to text, one at a time: whole characters only, and joined exactly what decoding all tokens at once gives."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from metrale_async.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_CONTEXT_BYTES: Final = 3
"""An incomplete character is at most this long, so no byte further back matters."""


class IncrementalDetokenizer:
    """Turns each token into its bytes by table and those into text by an incremental UTF-8 decoder, which keeps an
    incomplete character back until it is whole. Bytes that can never become one read U+FFFD.

    ``prefix_ids`` are the tokens before the first one pushed. A character that begins in them is completed; with
    none of them visible the text begins here, and the space that some tokenizers write before a first word is dropped.
    Without ``prefix_ids`` (None) the tokens continue a text of whole characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prefix_ids: Sequence[int] | None = None
    ) -> None:
        self._bytes = tokenizer.bytes_by_id
        self._skip = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._decode = _utf8_decoder(errors="replace").decode
        self._bytes_of_first: Callable[[int], bytes] | None = None
        if prefix_ids is not None:
            context = self._end_of(prefix_ids)
            if context:
                self._decode(context)
            elif tokenizer.drops_leading_space:
                self._bytes_of_first = tokenizer.bytes_of_first

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; often empty within a character."""
        if token_id in self._skip:
            return ""
        data = self._bytes[token_id]
        if self._bytes_of_first is not None and data:
            data = self._bytes_of_first(token_id)
            self._bytes_of_first = None
        return self._decode(data)

    def flush(self) -> str:
        """The text ends here: an incomplete character reads U+FFFD."""
        return self._decode(b"", True)

    def _end_of(self, prefix_ids: Sequence[int]) -> bytes:
        """As many of the last visible bytes as an incomplete character can have."""
        end = b""
        for token_id in reversed(prefix_ids):
            if token_id not in self._skip:
                end = self._bytes[token_id] + end
                if len(end) >= _CONTEXT_BYTES:
                    break
        return end
