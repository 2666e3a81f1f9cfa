"""Typed look-ups in a parsed config.json: wrong types and values are refused with the key's name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from metrale_async.errors import CheckpointError

MAX_DIMENSION = 2**31 - 1


def positive_int(values: Mapping[str, Any], key: str, default: int | None = None, maximum: int = MAX_DIMENSION) -> int:
    """``values[key]``, an integer from 1 to ``maximum``; ``default`` where the key is absent or null."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config: {key} is missing")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
        raise CheckpointError(f"config: {key} is {value!r}; allowed: an integer from 1 to {maximum}")
    return value


def positive_float(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """``values[key]``, a finite number above 0; ``default`` where the key is absent or null."""
    value = values.get(key)
    if value is None:
        if default is None:
            raise CheckpointError(f"config: {key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"config: {key} is {value!r}; allowed: a number above 0")
    return float(value)


def boolean(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """``values[key]``, true or false; ``default`` where the key is absent or null."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {key} is {value!r}; allowed: true or false")
    return value


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """``values[key]``, one token id or a list of them, without repeats; empty where the key is absent or null."""
    value = values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_DIMENSION:
            raise CheckpointError(f"config: {key} is {value!r}; allowed: a token id or a list of token ids")
    return tuple(dict.fromkeys(ids))
