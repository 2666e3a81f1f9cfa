"""Sampling parameters of one request: what each may be, and what turns it off.

This module is the single table of accepted, refused and neutral values; README's parameter table is generated from
:data:`PARAMETER_RANGES` and the HTTP schemas only check types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from metrale_async.errors import InvalidRequestError

MAX_N: Final = 128
MAX_STOP_STRINGS: Final = 16
MAX_STOP_STRING_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_LOGIT_BIAS_ENTRIES: Final = 1024
MAX_LOGPROBS: Final = 20
SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Documentation and limits of one parameter."""

    accepted: str
    off: str
    minimum: float | None = None
    maximum: float | None = None
    exclusive_minimum: bool = False


PARAMETER_RANGES: Final[Mapping[str, ParameterRange]] = {
    "temperature": ParameterRange("0 to 2; 0 is greedy", "1 leaves the distribution as it is", 0.0, 2.0),
    "top_p": ParameterRange("above 0, up to 1", "1", 0.0, 1.0, exclusive_minimum=True),
    "top_k": ParameterRange("-1, 0 or a positive integer", "-1 or 0", -1, 2**31 - 1),
    "min_p": ParameterRange("0 to 1", "0", 0.0, 1.0),
    "frequency_penalty": ParameterRange("-2 to 2", "0", -2.0, 2.0),
    "presence_penalty": ParameterRange("-2 to 2", "0", -2.0, 2.0),
    "repetition_penalty": ParameterRange("above 0, up to 2", "1", 0.0, 2.0, exclusive_minimum=True),
    "logit_bias": ParameterRange(f"up to {MAX_LOGIT_BIAS_ENTRIES} token ids, each -100 to 100", "absent or empty"),
    "seed": ParameterRange("a 64-bit integer", "absent: a random seed is drawn", SEED_MIN, SEED_MAX),
    "n": ParameterRange(f"1 to {MAX_N}", "1", 1, MAX_N),
    "stop": ParameterRange(
        f"a string or up to {MAX_STOP_STRINGS} of them, each 1 to {MAX_STOP_STRING_CHARS} characters", "absent or empty"
    ),
    "stop_token_ids": ParameterRange(f"up to {MAX_STOP_TOKEN_IDS} token ids of the vocabulary", "absent or empty"),
    "ignore_eos": ParameterRange("true or false", "false"),
    "min_tokens": ParameterRange("0 to max_tokens", "0", 0, 2**31 - 1),
    "max_tokens": ParameterRange("at least 1", "absent: as many as the context holds", 1, 2**31 - 1),
    "logprobs": ParameterRange(f"0 to {MAX_LOGPROBS} alternatives", "absent", 0, MAX_LOGPROBS),
    "prompt_logprobs": ParameterRange(f"0 to {MAX_LOGPROBS} alternatives", "absent", 0, MAX_LOGPROBS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; construction raises InvalidRequestError naming the field.

    The order of the filters is the usual one: logit_bias, penalties, temperature, top_k, top_p, min_p.
    Log-probabilities are those of the model's own distribution, before any of them.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    logprobs: int | None = None
    """How many alternatives to report beside the chosen token's own log-probability; None reports nothing."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, limits in PARAMETER_RANGES.items():
            value = getattr(self, name)
            if value is None or limits.minimum is None or limits.maximum is None:
                continue
            check_number(name, value, limits)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._check_stops()
        self._check_token_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; allowed: 0 to max_tokens, which is {self.max_tokens}",
                param="min_tokens",
            )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.frequency_penalty != 0.0 or self.presence_penalty != 0.0 or self.repetition_penalty != 1.0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have; needs the model, so the engine calls it at admission."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequestError(
                        f"{name} holds token id {token_id}; allowed: 0 to {vocab_size - 1}", param=name
                    )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop holds {len(self.stop)} strings; allowed: up to {MAX_STOP_STRINGS}", param="stop"
            )
        for stop in self.stop:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"each stop must be a string of 1 to {MAX_STOP_STRING_CHARS} characters", param="stop"
                )

    def _check_token_lists(self) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids holds {len(self.stop_token_ids)} ids; allowed: up to {MAX_STOP_TOKEN_IDS}",
                param="stop_token_ids",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequestError(
                f"logit_bias holds {len(self.logit_bias)} entries; allowed: up to {MAX_LOGIT_BIAS_ENTRIES}",
                param="logit_bias",
            )
        for bias in self.logit_bias.values():
            if not isinstance(bias, int | float) or isinstance(bias, bool) or not -100.0 <= bias <= 100.0:
                raise InvalidRequestError(f"logit_bias holds {bias!r}; allowed: -100 to 100", param="logit_bias")


def check_number(name: str, value: object, limits: ParameterRange) -> None:
    """Raise InvalidRequestError unless ``value`` is a finite number within ``limits`` (NaN never is)."""
    assert limits.minimum is not None and limits.maximum is not None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    above = number > limits.minimum if limits.exclusive_minimum else number >= limits.minimum
    if not (above and number <= limits.maximum):
        shown = repr(value)
        raise InvalidRequestError(
            f"{name} is {shown if len(shown) <= 40 else shown[:40] + '...'}; allowed: {limits.accepted}", param=name
        )
