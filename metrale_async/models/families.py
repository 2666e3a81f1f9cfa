"""What tells one model family from another: a table, so that the decoder itself has no ``if model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from metrale_async.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Family:
    """One ``model_type`` of config.json and how its checkpoints differ from a plain Llama."""

    model_type: str
    architectures: tuple[str, ...]
    """The class names under ``architectures`` that stand for the causal language model."""
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
    delta_projections: Literal["by head", "by kind"] = "by head"
    """How the delta net's input projections are stored: for each key head its query, key, values and gates in one
    matrix, or one matrix for all queries, keys and values, one for all gates, and so on."""
    rotary_sections: bool = False
    """The rotary embedding has a position for time, height and width (``mrope_section``); in text all are equal."""
    has_images: bool = False
    """Checkpoints may hold an image encoder beside the language model, which then has its configuration under
    ``text_config`` and its tensors under ``model.language_model``."""
    ignored_prefixes: tuple[str, ...] = ()
    """Tensors beside the decoder that are known and not needed (draft heads, image encoders)."""


_QWEN3_NEXT: Final = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
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
)
# The type with ``_text`` is the language model on its own; the one without may have images beside it.
_QWEN3_5_MOE: Final = tuple(
    replace(
        _QWEN3_NEXT,
        model_type=model_type,
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        delta_projections="by kind",
        rotary_sections=True,
        has_images=True,
        ignored_prefixes=("mtp.", "model.visual."),
    )
    for model_type in ("qwen3_5_moe", "qwen3_5_moe_text")
)
_QWEN3_5: Final = tuple(
    replace(
        family,
        model_type=family.model_type.replace("_moe", ""),
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        experts="never",
    )
    for family in _QWEN3_5_MOE
)

FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family
    for family in (
        Family("llama", ("LlamaForCausalLM",), "config", mlp_bias_key=True, query_key_norm=False, window="never"),
        Family(
            "mistral", ("MistralForCausalLM",), "never", mlp_bias_key=False, query_key_norm=False, window="every layer"
        ),
        Family("qwen2", ("Qwen2ForCausalLM",), "qkv", mlp_bias_key=False, query_key_norm=False, window="layer types"),
        Family(
            "qwen3",
            ("Qwen3ForCausalLM",),
            "config",
            mlp_bias_key=False,
            query_key_norm=True,
            window="layer types",
            default_head_dim=128,
        ),
        Family(
            "qwen3_moe",
            ("Qwen3MoeForCausalLM",),
            "config",
            mlp_bias_key=False,
            query_key_norm=True,
            window="layer types",
            experts="routed",
        ),
        _QWEN3_NEXT,
        *_QWEN3_5,
        *_QWEN3_5_MOE,
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
