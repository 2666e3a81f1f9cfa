"""Log-probabilities in the three shapes clients know: of chat, of text completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from metrale_async.engine import TokenLogprobs
from metrale_async.text import IncrementalDetokenizer, Tokenizer

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """The ``content`` list of a chat choice's logprobs: exactly as many alternatives as were asked for."""
    return [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None], alternatives: int
) -> list[dict[str, dict[str, Any]] | None]:
    """One object per prompt position, token id to logprob; null for the first, which nothing precedes. ``rank`` is
    null for a token that is not among the alternatives."""
    return [None if entry is None else _prompt_position(tokenizer, entry, alternatives) for entry in entries]


def _prompt_position(tokenizer: Tokenizer, entry: TokenLogprobs, alternatives: int) -> dict[str, dict[str, Any]]:
    found = {
        str(token_id): _prompt_token(tokenizer, token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(entry.top[:alternatives], 1)
    }
    found.setdefault(str(entry.token_id), _prompt_token(tokenizer, entry.token_id, entry.logprob, None))
    return found


def _prompt_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}


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

    def of_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text: str
    ) -> dict[str, list[Any]]:
        """The prompt's own tokens, for ``echo``; ``text`` is what is echoed for them."""
        made = self._objects(token_ids, entries)
        # What is echoed may differ from the tokens' text by a space that tokenizers put first.
        self._offset = len(text)
        made["text_offset"] = [min(offset, len(text)) for offset in made["text_offset"]]
        return made

    def of_tokens(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        return self._objects([entry.token_id for entry in entries], entries)

    def _objects(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, list[Any]]:
        text_of = self._tokenizer.token_text
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
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


def joined(parts: Iterable[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Completion logprobs of consecutive pieces as one."""
    whole: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            whole[name] += values
    return whole
