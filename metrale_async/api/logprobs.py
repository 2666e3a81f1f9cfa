"""Log-probabilities in the three shapes clients know: of chat, of text completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import orjson

from metrale_async.engine import TokenLogprobs
from metrale_async.text import IncrementalDetokenizer, Tokenizer

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""
_POSITIONS_AT_ONCE: Final = 500

JsonLists = Mapping[str, list[bytes]]
"""Lists by name, each as pieces of JSON without brackets."""


def json_list(items: Iterable[Any]) -> orjson.Fragment:
    """A list as JSON, made some hundred items at a time: a long prompt's objects are never all there, which would set
    the cycle collector off, and the interpreter lock, which orjson keeps, is free in between."""
    items = iter(items)
    pieces = []
    while some := list(islice(items, _POSITIONS_AT_ONCE)):
        pieces.append(orjson.dumps(some)[1:-1])
    return _in_brackets(pieces)


def _in_brackets(pieces: Iterable[bytes]) -> orjson.Fragment:
    return orjson.Fragment(b"[" + b",".join(pieces) + b"]")


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> orjson.Fragment:
    """The ``content`` list of a chat choice's logprobs: exactly as many alternatives as were asked for."""
    return json_list(
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    )


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None], alternatives: int
) -> orjson.Fragment:
    """One object per prompt position, token id to logprob; null for the first, which nothing precedes. ``rank`` is
    null for a token that is not among the alternatives."""
    return json_list(None if entry is None else _prompt_position(tokenizer, entry, alternatives) for entry in entries)


def _prompt_position(tokenizer: Tokenizer, entry: TokenLogprobs, alternatives: int) -> dict[str, dict[str, Any]]:
    found = {
        str(token_id): _prompt_token(tokenizer, token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top[:alternatives], 1)
    }
    found.setdefault(str(entry.token_id), _prompt_token(tokenizer, entry.token_id, entry.logprob, None))
    return found


def _prompt_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}


_LISTS: Final = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class CompletionLogprobs:
    """The logprobs of one text choice, piece by piece.

    ``text_offset`` of a token is the length of the choice's text before it, in characters; tokens that make up one
    character together have the same.
    """

    def __init__(self, tokenizer: Tokenizer, alternatives: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def of_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str) -> JsonLists:
        """The prompt's own tokens, for ``echo``; ``text`` is what is echoed for them."""
        made = self._lists(token_ids, entries, last_offset=len(text))
        # What is echoed may differ from the tokens' text by a space that tokenizers put first.
        self._offset = len(text)
        return made

    def of_tokens(self, entries: Sequence[TokenLogprobs]) -> JsonLists:
        return self._lists([entry.token_id for entry in entries], entries)

    def _lists(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], last_offset: int | None = None
    ) -> JsonLists:
        lists: dict[str, list[bytes]] = {name: [] for name in _LISTS}
        for start in range(0, len(token_ids), _POSITIONS_AT_ONCE):
            end = start + _POSITIONS_AT_ONCE
            for name, values in self._objects(token_ids[start:end], entries[start:end], last_offset).items():
                lists[name].append(orjson.dumps(values)[1:-1])
        return lists

    def _objects(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], last_offset: int | None
    ) -> dict[str, list[Any]]:
        text_of = self._tokenizer.token_text
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset if last_offset is None else min(self._offset, last_offset))
            self._offset += len(self._detokenizer.push(token_id))
        return {
            "tokens": [text_of(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else max(entry.logprob, MIN_LOGPROB) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives by their text, and the token itself if it is none of them."""
        text_of = self._tokenizer.token_text
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._alternatives], (entry.token_id, entry.logprob)):
            # Different tokens may read the same (parts of a character); the likeliest stands for them.
            found.setdefault(text_of(token_id), max(logprob, MIN_LOGPROB))
        return found


def joined(parts: Sequence[JsonLists]) -> dict[str, orjson.Fragment]:
    """Completion logprobs of consecutive pieces as one object."""
    return {name: _in_brackets(piece for part in parts for piece in part[name]) for name in _LISTS}
