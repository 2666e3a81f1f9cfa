"""What a request gives back: deltas while it runs, and the whole when they are joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from metrale_async.execution import TokenLogprobs

FinishReason = Literal["stop", "length", "timeout", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one step added to one choice.

    ``text`` may be empty (a character or a possible stop is incomplete) and may belong to earlier tokens than
    ``token_ids``. Exactly one delta per choice carries a ``finish_reason``, and it is that choice's last.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for an end-of-sequence token."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first delta of choice 0 only, when asked for; the first entry is None (nothing precedes it)."""
    usage: Usage | None = None
    """On the request's very last delta."""


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One finished choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[ChoiceOutput, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
