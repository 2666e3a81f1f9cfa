"""What the engine tells whoever watches it: metrics, logs and tests see the same records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step."""

    duration_s: float
    """From submission to the device until its result was committed."""
    prefill_tokens: int
    decode_tokens: int
    sequences: int
    inter_token_s: tuple[float, ...]
    """For every sequence that got a token and had one before: the seconds between the two."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request, whatever ended it. Holds no text."""

    request_id: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    choices: int
    finish_reasons: tuple[str, ...]
    """One per choice; ``abort`` when the client left, ``error`` when a step failed under it."""
    queue_s: float | None
    """Until its first prefill chunk was scheduled; None if it never was."""
    time_to_first_token_s: float | None
    total_s: float
    preemptions: int


class EngineObserver(Protocol):
    """Called on the event loop, inside the step cycle: must return at once and never raise."""

    def step_finished(self, record: StepRecord) -> None: ...

    def request_finished(self, record: RequestRecord) -> None: ...
