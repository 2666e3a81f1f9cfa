"""From a request's fields to sampling parameters: what it gives, else generation_config, else neutral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from metrale_async.api.schemas import GenerationFields
from metrale_async.engine import SamplingParams
from metrale_async.engine.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from metrale_async.errors import InvalidRequestError

_SAME_NAME: Final = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
_MAX_TOKEN_ID_DIGITS: Final = 10


def sampling_params(
    fields: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    **overrides: Any,
) -> SamplingParams:
    """Raises InvalidRequestError naming the field."""
    given = {name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None}
    if fields.stop is not None:
        given["stop"] = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop)
    if fields.logit_bias is not None:
        given["logit_bias"] = _token_biases(fields.logit_bias)
    return SamplingParams(**{**defaults, **given, "max_tokens": max_tokens, "logprobs": logprobs, **overrides})


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    if len(biases) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequestError(
            f"logit_bias holds {len(biases)} entries; allowed: up to {MAX_LOGIT_BIAS_ENTRIES}", param="logit_bias"
        )
    found = {}
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_TOKEN_ID_DIGITS):
            raise InvalidRequestError(f"logit_bias names {name[:40]!r}; allowed: token ids", param="logit_bias")
        found[int(name)] = bias
    if len(found) != len(biases):
        raise InvalidRequestError("logit_bias names a token id twice", param="logit_bias")
    return found
