"""Sampling flags of ``generate`` and ``chat``: the request parameters of the engine, by the same names and limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from metrale_async.arguments import argument, flag_name
from metrale_async.engine.sampling_params import PARAMETER_RANGES, SamplingParams, check_number
from metrale_async.errors import ConfigurationError, InvalidRequestError

_GROUP: Final = "Sampling"


def _parameter(name: str, help: str) -> Any:
    return argument(None, group=_GROUP, help=f"{help}: {PARAMETER_RANGES[name].accepted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingArgs:
    """What is not given is left to the checkpoint's generation_config, and to neutral values after that."""

    max_tokens: int | None = _parameter("max_tokens", "longest answer in tokens")
    temperature: float | None = _parameter("temperature", "randomness")
    top_p: float | None = _parameter("top_p", "probability mass that is kept")
    top_k: int | None = _parameter("top_k", "most likely tokens that are kept")
    min_p: float | None = _parameter("min_p", "least probability, as a share of the best token's")
    frequency_penalty: float | None = _parameter("frequency_penalty", "penalty for each occurrence")
    presence_penalty: float | None = _parameter("presence_penalty", "penalty for any occurrence")
    repetition_penalty: float | None = _parameter("repetition_penalty", "factor against what was said already")
    seed: int | None = _parameter("seed", "the same seed gives the same answer")
    min_tokens: int | None = _parameter("min_tokens", "shortest answer in tokens")
    stop: tuple[str, ...] = argument((), group=_GROUP, help="text before which the answer ends")
    ignore_eos: bool = argument(False, group=_GROUP, help="go on where the model would end")

    def __post_init__(self) -> None:
        found = []
        for name, value in self.given().items():
            limits = PARAMETER_RANGES[name]
            try:
                if limits.minimum is not None:
                    check_number(name, value, limits)
                elif name == "stop":
                    SamplingParams(stop=value)
            except InvalidRequestError as error:
                found.append(f"{flag_name(name)}: {error.message}")
        if not found:
            try:
                SamplingParams(**self.given())
            except InvalidRequestError as error:
                found.append(error.message)
        if found:
            raise ConfigurationError(found)

    def given(self) -> Mapping[str, Any]:
        """The parameters that were set, by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # By identity where it must be: 0 equals False, and a temperature of 0 is given.
        return {name: value for name, value in values.items() if not (value is None or value is False or value == ())}
