"""What a checkpoint recommends for sampling, and which tokens end an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metrale_async.errors import CheckpointError
from metrale_async.models.config import ModelConfig
from metrale_async.models.config_fields import token_ids
from metrale_async.models.safetensors_weights import read_json_object


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Recommended sampling parameters; None where the checkpoint has no opinion.

    ``do_sample`` is not looked at: as elsewhere in serving, a temperature of 0 is what asks for greedy decoding.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def generation_defaults_from_hf(directory: Path, config: ModelConfig) -> GenerationDefaults:
    """Read ``generation_config.json``; without one, only the end tokens of config.json are known."""
    path = directory / "generation_config.json"
    raw = read_json_object(path) if path.is_file() else {}
    return GenerationDefaults(
        temperature=_number(raw, "temperature"),
        top_p=_number(raw, "top_p"),
        top_k=_integer(raw, "top_k"),
        min_p=_number(raw, "min_p"),
        repetition_penalty=_number(raw, "repetition_penalty"),
        max_new_tokens=_integer(raw, "max_new_tokens"),
        eos_token_ids=token_ids(raw, "eos_token_id") or config.eos_token_ids,
    )


def generation_defaults_from_gguf(metadata: Mapping[str, Any], config: ModelConfig) -> GenerationDefaults:
    """Read the ``general.sampling`` keys of a GGUF file."""
    return GenerationDefaults(
        temperature=_number(metadata, "general.sampling.temp"),
        top_p=_number(metadata, "general.sampling.top_p"),
        top_k=_integer(metadata, "general.sampling.top_k"),
        min_p=_number(metadata, "general.sampling.min_p"),
        repetition_penalty=_number(metadata, "general.sampling.penalty_repeat"),
        eos_token_ids=config.eos_token_ids,
    )


def _number(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"generation defaults: {key} is {value!r}; allowed: a number")
    return float(value)


def _integer(raw: Mapping[str, Any], key: str) -> int | None:
    value = _number(raw, key)
    if value is None:
        return None
    if not value.is_integer():
        raise CheckpointError(f"generation defaults: {key} is {value!r}; allowed: an integer")
    return int(value)
