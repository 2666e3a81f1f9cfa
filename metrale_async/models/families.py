"""What tells one model family from another: a table, so that the decoder itself has no ``if model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from metrale_async.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type`` of config.json and how its checkpoints differ from a plain Llama."""

    model_type: str
    architecture: str
    """The class name under ``architectures`` that stands for the causal language model."""
    attention_bias: Literal["config", "qkv", "never"]
    """``config``: the key ``attention_bias`` decides, for q, k, v and o alike. ``qkv``: always, but not on o."""
    mlp_bias_key: bool
    """The key ``mlp_bias`` means something to this family."""
    query_key_norm: bool
    """Queries and keys are normalised per head before the rotary embedding."""
    window: Literal["never", "every layer", "layer types"]
    """Which layers obey ``sliding_window``."""
    default_head_dim: int | None = None
    """Head size where config.json is silent; None is hidden size over heads."""
    experts: Literal["never", "routed", "routed and shared"] = "never"
    """Feed-forward blocks may be mixtures of experts, with one more expert that every token uses or without."""
    normalises_expert_weights: bool = False
    """What ``norm_topk_prob`` is where config.json is silent."""
    delta_net: bool = False
    """Layers of type ``linear_attention`` are gated delta nets; the other ones' attention has an output gate."""
    zero_centred_norms: bool = False
    """Norm weights are stored less 1, but for the norm inside the delta net."""
    default_partial_rotary: float = 1.0
    """Share of a head that is rotated where config.json is silent."""
    ignored_prefixes: tuple[str, ...] = ()
    """Tensors beside the decoder that are known and not needed (draft heads)."""


FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", "config", mlp_bias_key=True, query_key_norm=False, window="never"),
        Family(
            "mistral", "MistralForCausalLM", "never", mlp_bias_key=False, query_key_norm=False, window="every layer"
        ),
        Family("qwen2", "Qwen2ForCausalLM", "qkv", mlp_bias_key=False, query_key_norm=False, window="layer types"),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            "config",
            mlp_bias_key=False,
            query_key_norm=True,
            window="layer types",
            default_head_dim=128,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            "config",
            mlp_bias_key=False,
            query_key_norm=True,
            window="layer types",
            experts="routed",
        ),
        Family(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            "config",
            mlp_bias_key=False,
            query_key_norm=True,
            window="never",
            default_head_dim=256,
            experts="routed and shared",
            normalises_expert_weights=True,
            delta_net=True,
            zero_centred_norms=True,
            default_partial_rotary=0.25,
            ignored_prefixes=("mtp.",),
        ),
    )
}


def family_of(model_type: object) -> Family:
    """The family called ``model_type``; raises UnsupportedModelError that lists the ones there are."""
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )
    return family
