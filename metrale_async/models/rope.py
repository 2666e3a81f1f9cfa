"""Rotary position embeddings: what a checkpoint says about them, and the cos/sin tables that follow.

Every kind computes the inverse frequencies in the order of operations that ``transformers`` uses, in float32, so that
the tables agree with it to the last bit on one machine.

**Dynamic NTK.** ``transformers`` enlarges the base once a sequence outgrows ``max_position_embeddings``, by the current
length: the first token's rotation then depends on how many tokens come after it, and with a KV cache on when it was
computed. Here an answer depends on the tokens before it alone, so a ``dynamic`` model is served up to its
``max_position_embeddings``, where the base is the plain one and both agree at every position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models.config_fields import boolean, positive_float, positive_int

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_KNOWN_KEYS: Final[Mapping[RopeKind, frozenset[str]]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_COMMON_KEYS: Final = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_SECTION_KEYS: Final = frozenset({"mrope_section", "mrope_interleaved"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """Normalised rotary embedding of one model. Fields of other kinds than ``kind`` keep their neutral values."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    rotary_dim: int
    """Values of each head that are rotated; even."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN, Peng et al. 2023)."""
    frequency_divisors: tuple[float, ...] | None = None
    """Divisor of each inverse frequency, as GGUF files store Llama 3's scaling (tensor ``rope_freqs``)."""


def rope_parameters_from_hf(
    config: Mapping[str, Any], head_dim: int, max_position_embeddings: int, *, sections: bool = False
) -> tuple[RopeParameters, int]:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Returns the parameters and the longest sequence the model is good for: ``max_position_embeddings``, times ``factor``
    for linear, and at least ``original_max_position_embeddings`` times ``factor`` for YaRN, as these configs mean it.
    With ``sections``, a config may say which pairs turn with time, height or width: in a text all three are one.
    Raises UnsupportedModelError for a kind or key this module has no code for, CheckpointError for a wrong value.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise CheckpointError(f"config: rope_scaling is {raw!r}; allowed: an object or null")
    kind = raw.get("rope_type", raw.get("type")) or "default"
    if not isinstance(kind, str) or kind not in _KNOWN_KEYS:
        nested = [key for key, value in raw.items() if isinstance(value, dict)]
        what = f"rope parameters per layer type ({', '.join(nested)})" if nested else f"rope type {kind!r}"
        raise UnsupportedModelError(f"{what} is not supported; supported rope types: {', '.join(_KNOWN_KEYS)}")
    # Real configs carry left-overs of kinds they do not use.
    known = _COMMON_KEYS.union(*_KNOWN_KEYS.values(), _SECTION_KEYS if sections else ())
    for key, value in raw.items():
        if key not in known and value is not None:
            raise UnsupportedModelError(f"rope parameter {key!r} of rope type {kind!r} is not supported")

    theta = positive_float(raw, "rope_theta", positive_float(config, "rope_theta", 10000.0))
    partial = positive_float(raw, "partial_rotary_factor", positive_float(config, "partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * partial)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise CheckpointError(
            f"config: partial_rotary_factor {partial:g} of head_dim {head_dim} is {rotary_dim} rotated values; "
            f"allowed: an even number from 2 to {head_dim}"
        )
    if kind == "default":
        return RopeParameters(theta=theta, rotary_dim=rotary_dim), max_position_embeddings
    if kind == "linear":
        factor = positive_float(raw, "factor")
        linear = RopeParameters(kind="linear", theta=theta, rotary_dim=rotary_dim, factor=factor)
        return linear, max(max_position_embeddings, int(max_position_embeddings * factor))
    if kind == "dynamic":
        factor = positive_float(raw, "factor")
        return RopeParameters(
            kind="dynamic", theta=theta, rotary_dim=rotary_dim, factor=factor
        ), max_position_embeddings

    original = positive_int(raw, "original_max_position_embeddings", max_position_embeddings)
    # A value outside the rope parameters has priority, as in transformers.
    original = positive_int(config, "original_max_position_embeddings", original)
    if kind == "llama3":
        low = positive_float(raw, "low_freq_factor")
        high = positive_float(raw, "high_freq_factor")
        if high <= low:
            raise CheckpointError(f"config: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
        llama3 = RopeParameters(
            kind="llama3",
            theta=theta,
            rotary_dim=rotary_dim,
            factor=positive_float(raw, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
        return llama3, max_position_embeddings
    factor = positive_float(raw, "factor", max_position_embeddings / original)
    if theta <= 1:
        raise CheckpointError(f"config: rope_theta is {theta:g}; allowed with yarn: a number above 1")
    yarn = RopeParameters(
        kind="yarn",
        theta=theta,
        rotary_dim=rotary_dim,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=positive_float(raw, "beta_fast", 32.0),
        beta_slow=positive_float(raw, "beta_slow", 1.0),
        truncate=boolean(raw, "truncate", True),
        attention_factor=_yarn_attention_factor(raw, factor),
    )
    return yarn, max(max_position_embeddings, int(original * factor))


def _yarn_attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    if raw.get("attention_factor") is not None:
        return positive_float(raw, "attention_factor")
    # Zero switches these two off, as in the DeepSeek configs they come from.
    mscale = positive_float(raw, "mscale") if raw.get("mscale") else None
    mscale_all_dim = positive_float(raw, "mscale_all_dim") if raw.get("mscale_all_dim") else None
    if mscale is not None and mscale_all_dim is not None:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Temperature of the attention logits after stretching by ``factor`` (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeParameters) -> Tensor:
    """float32 [rotary_dim / 2], radians per position of each rotated pair."""
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers: Tensor = rope.theta**exponents
    if rope.kind == "yarn":
        frequencies = _yarn(rope, powers)
    else:
        frequencies = 1.0 / powers
        if rope.kind == "linear":
            frequencies = frequencies / rope.factor
        elif rope.kind == "llama3":
            frequencies = _llama3(rope, frequencies)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies


def rope_tables(rope: RopeParameters, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, rotary_dim / 2], scaled by the attention factor."""
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse_frequencies(rope)
    cos = angles.cos().mul_(rope.attention_factor)
    sin = angles.sin_().mul_(rope.attention_factor)
    return cos.to(device), sin.to(device)


def _llama3(rope: RopeParameters, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1 reference code)."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / rope.factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeParameters, powers: Tensor) -> Tensor:
    """NTK-by-parts interpolation (YaRN, section 3.2)."""
    dim = rope.rotary_dim

    def correction_dim(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolated_share = 1 - ramp
    interpolated = 1.0 / (rope.factor * powers)
    return interpolated * (1 - extrapolated_share) + (1.0 / powers) * extrapolated_share
