"""The one description of a model that the rest of the package works from, whatever file it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models.config_fields import boolean, positive_float, positive_int, token_ids
from metrale_async.models.families import Family, family_of
from metrale_async.models.rope import RopeParameters, rope_parameters_from_hf

LayerType = Literal["full_attention", "sliding_attention", "linear_attention"]
MAX_LAYERS: Final = 4096
"""More than any model has; a corrupt count must not cost memory before the weights are compared with it."""
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")

# Keys of other models' configs that change what is computed. A checkpoint that sets one of them to anything but its
# neutral value is refused: ignoring it would give fluent, wrong answers.
_UNSUPPORTED_FEATURES: Final[Mapping[str, tuple[Any, ...]]] = {
    "quantization_config": (),
    "compression_config": (),
    "attn_logit_softcapping": (0, 0.0),
    "final_logit_softcapping": (0, 0.0),
    "logit_softcapping": (0, 0.0),
    "query_pre_attn_scalar": (),
    "attention_multiplier": (),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "scale_emb": (1, 1.0),
    "clip_qkv": (),
    "n_routed_experts": (0,),
    "no_rope_layers": ([],),
    "attn_temperature_tuning": (False, 0),
    "attention_chunk_size": (),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "rope_interleaved": (False,),
    "use_parallel_residual": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu"),
    "compress_ratios": ([],),
    "audio_config": (),
    "adapter_config": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture-of-experts feed-forward blocks."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalise_weights: bool
    """The chosen experts' weights are divided by their sum (``norm_topk_prob``)."""
    shared_intermediate_size: int | None
    """Size of the expert every token uses, if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Gated delta nets (``linear_*`` keys)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    projections: Literal["by head", "by kind"]
    """See ``Family.delta_projections``."""

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder, normalised. Names are config.json's; sizes are in values unless said otherwise."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the feed-forward blocks without experts; 0 if there are none."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    """Longest sequence in tokens that the model is good for, rope scaling included (see ``rope``)."""
    rope: RopeParameters
    layer_types: tuple[LayerType, ...]
    """One entry per layer; ``sliding_attention`` layers see the newest ``sliding_window`` tokens."""
    sliding_window: int | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """The attention's output projection has a bias."""
    mlp_bias: bool
    query_key_norm: bool
    eos_token_ids: tuple[int, ...]
    attention_gate: bool = False
    """Attention's result is multiplied by a sigmoid gate that the query projection gives."""
    zero_centred_norms: bool = False
    """Norm weights in the checkpoint are less 1."""
    experts: ExpertsConfig | None = None
    sparse_layers: frozenset[int] = frozenset()
    """Layers whose feed-forward block is a mixture of experts."""
    delta: DeltaConfig | None = None
    """What layers of type ``linear_attention`` are."""
    ignored_prefixes: tuple[str, ...] = ()
    """Tensors whose names begin so are left alone."""
    text_prefix: str | None = None
    """Beginning of tensor names that stands for ``model.``, where the checkpoint has more beside its language model."""

    def window_of(self, layer: int) -> int | None:
        """Tokens layer ``layer`` attends to, itself included; None is all of them."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    @staticmethod
    def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
        """Normalise a parsed config.json.

        Raises UnsupportedModelError for a model type, activation or feature without an implementation, and
        CheckpointError for a value that is missing, of the wrong type or in contradiction to another.
        """
        family = family_of(raw.get("model_type"))
        raw = _language_model(raw, family)
        _refuse_unsupported(raw, family)
        hidden_size = positive_int(raw, "hidden_size")
        heads = positive_int(raw, "num_attention_heads")
        kv_heads = positive_int(raw, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise CheckpointError(
                f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _head_dim(raw, family, hidden_size, heads)
        layers = positive_int(raw, "num_hidden_layers", maximum=MAX_LAYERS)
        attention_bias = family.attention_bias == "config" and boolean(raw, "attention_bias", False)
        rope, max_positions = rope_parameters_from_hf(
            {"partial_rotary_factor": family.default_partial_rotary, **raw},
            head_dim,
            positive_int(raw, "max_position_embeddings", 2048),
            sections=family.rotary_sections,
        )
        if family.delta_net:
            layer_types, window = _layer_types_with_delta_nets(raw, layers), None
        else:
            layer_types, window = _attention_windows(raw, family, layers)
        experts, sparse_layers = _experts(raw, family, layers)
        return ModelConfig(
            model_type=family.model_type,
            vocab_size=positive_int(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(raw, "intermediate_size") if len(sparse_layers) < layers else 0,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=positive_float(raw, "rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            rope=rope,
            layer_types=layer_types,
            sliding_window=window,
            tie_word_embeddings=boolean(raw, "tie_word_embeddings", False),
            qkv_bias=attention_bias or family.attention_bias == "qkv",
            output_bias=attention_bias,
            mlp_bias=family.mlp_bias_key and boolean(raw, "mlp_bias", False),
            query_key_norm=family.query_key_norm,
            eos_token_ids=token_ids(raw, "eos_token_id"),
            attention_gate=family.delta_net,
            zero_centred_norms=family.zero_centred_norms,
            experts=experts,
            sparse_layers=sparse_layers,
            delta=_delta(raw, family) if "linear_attention" in layer_types else None,
            ignored_prefixes=family.ignored_prefixes,
            text_prefix="model.language_model." if family.has_images else None,
        )


def _language_model(raw: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The keys that describe the language model: all of them, or those under ``text_config`` and what holds for the
    whole checkpoint."""
    if not family.has_images:
        if raw.get("vision_config") is not None:
            raise UnsupportedModelError("config: vision_config asks for a feature that is not supported")
        return raw
    text = raw.get("text_config")
    if text is None:
        return raw
    if not isinstance(text, dict):
        raise CheckpointError(f"config: text_config is {text!r}; allowed: an object")
    if text.get("model_type", family.model_type) not in (family.model_type, f"{family.model_type}_text"):
        raise UnsupportedModelError(
            f"config: text_config has the model type {text['model_type']!r}, which does not belong to "
            f"{family.model_type!r}"
        )
    whole = {
        key: value for key, value in raw.items() if value is not None and key not in ("text_config", "vision_config")
    }
    return {**text, **whole}


def _refuse_unsupported(raw: Mapping[str, Any], family: Family) -> None:
    architectures = raw.get("architectures")
    if architectures and not set(architectures) & set(family.architectures):
        raise UnsupportedModelError(
            f"architectures {architectures!r} is not supported for model type {family.model_type!r}; "
            f"supported: {', '.join(family.architectures)}"
        )
    for key, neutral in _UNSUPPORTED_FEATURES.items():
        value = raw.get(key)
        if value is not None and not any(value == other and type(value) is type(other) for other in neutral):
            raise UnsupportedModelError(f"config: {key} = {value!r} asks for a feature that is not supported")
    if family.experts == "never":
        for key in ("num_experts", "num_local_experts"):
            if raw.get(key):
                raise UnsupportedModelError(f"config: {key} = {raw[key]!r} asks for a feature that is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise UnsupportedModelError(f"config: hidden_act {activation!r} is not supported; supported: silu")
    if family.attention_bias != "config" and boolean(raw, "attention_bias", family.attention_bias == "qkv") != (
        family.attention_bias == "qkv"
    ):
        raise UnsupportedModelError(
            f"config: attention_bias = {raw['attention_bias']!r} is not supported for model type {family.model_type!r}"
        )
    if not family.mlp_bias_key and boolean(raw, "mlp_bias", False):
        raise UnsupportedModelError(f"config: mlp_bias = true is not supported for model type {family.model_type!r}")


def _head_dim(raw: Mapping[str, Any], family: Family, hidden_size: int, heads: int) -> int:
    if raw.get("head_dim") is not None:
        return positive_int(raw, "head_dim")
    if family.default_head_dim is not None:
        return family.default_head_dim
    if hidden_size % heads:
        raise CheckpointError(f"config: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}")
    return hidden_size // heads


def _attention_windows(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[tuple[LayerType, ...], int | None]:
    """The attention type of each layer and the window that the sliding ones use."""
    window = positive_int(raw, "sliding_window") if raw.get("sliding_window") is not None else None
    explicit = raw.get("layer_types")
    if explicit is not None:
        if not isinstance(explicit, list) or len(explicit) != layers:
            raise CheckpointError(f"config: layer_types must name the type of each of the {layers} layers")
        for name in explicit:
            if name not in _LAYER_TYPES:
                raise UnsupportedModelError(
                    f"config: layer type {name!r} is not supported for model type {family.model_type!r}; "
                    f"supported: {', '.join(_LAYER_TYPES)}"
                )

    if family.window == "never":
        implied: list[LayerType] = ["full_attention"] * layers
        if window is not None:
            raise UnsupportedModelError(
                f"config: sliding_window = {window} is not supported for model type {family.model_type!r}"
            )
    elif family.window == "every layer":
        implied = ["full_attention" if window is None else "sliding_attention"] * layers
    else:
        # sliding_window stays in these configs when it is switched off; use_sliding_window decides.
        if not boolean(raw, "use_sliding_window", False):
            window = None
        first = raw.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise CheckpointError(f"config: max_window_layers is {first!r}; allowed: an integer of at least 0")
        implied = [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(layers)
        ]
        if explicit is not None:
            if window is None and "sliding_attention" in explicit:
                raise CheckpointError("config: layer_types has sliding_attention, but no sliding_window is in use")
            implied = list(explicit)
    if explicit is not None and implied != explicit:
        raise UnsupportedModelError(
            f"config: layer_types {explicit!r} is not supported for model type {family.model_type!r} "
            f"with sliding_window = {window}"
        )
    return tuple(implied), window if "sliding_attention" in implied else None


def _layer_types_with_delta_nets(raw: Mapping[str, Any], layers: int) -> tuple[LayerType, ...]:
    """``layer_types``, or every ``full_attention_interval``-th layer with attention."""
    if raw.get("sliding_window") is not None and raw.get("use_sliding_window"):
        raise UnsupportedModelError(f"config: sliding_window = {raw['sliding_window']!r} is not supported here")
    explicit = raw.get("layer_types")
    if explicit is None:
        interval = positive_int(raw, "full_attention_interval", 4)
        return tuple("linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers))
    if not isinstance(explicit, list) or len(explicit) != layers:
        raise CheckpointError(f"config: layer_types must name the type of each of the {layers} layers")
    known: tuple[LayerType, ...] = ("full_attention", "linear_attention")
    for name in explicit:
        if name not in known:
            raise UnsupportedModelError(f"config: layer type {name!r} is not supported; supported: {', '.join(known)}")
    return tuple(explicit)


def _delta(raw: Mapping[str, Any], family: Family) -> DeltaConfig:
    delta = DeltaConfig(
        key_heads=positive_int(raw, "linear_num_key_heads", 16),
        value_heads=positive_int(raw, "linear_num_value_heads", 32),
        key_dim=positive_int(raw, "linear_key_head_dim", 128),
        value_dim=positive_int(raw, "linear_value_head_dim", 128),
        conv_kernel=positive_int(raw, "linear_conv_kernel_dim", 4),
        projections=family.delta_projections,
    )
    if delta.value_heads % delta.key_heads:
        raise CheckpointError(
            f"config: linear_num_value_heads {delta.value_heads} is not a multiple of "
            f"linear_num_key_heads {delta.key_heads}"
        )
    return delta


def _experts(raw: Mapping[str, Any], family: Family, layers: int) -> tuple[ExpertsConfig | None, frozenset[int]]:
    """The experts, and the layers that have them (``decoder_sparse_step`` and ``mlp_only_layers``)."""
    if family.experts == "never":
        return None, frozenset()
    count = positive_int(raw, "num_experts" if raw.get("num_experts") is not None else "num_local_experts")
    experts = ExpertsConfig(
        num_experts=count,
        experts_per_token=positive_int(raw, "num_experts_per_tok", maximum=count),
        intermediate_size=positive_int(raw, "moe_intermediate_size"),
        normalise_weights=boolean(raw, "norm_topk_prob", family.normalises_expert_weights),
        shared_intermediate_size=positive_int(raw, "shared_expert_intermediate_size")
        if family.experts == "routed and shared"
        else None,
    )
    step = positive_int(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise CheckpointError(f"config: mlp_only_layers is {dense!r}; allowed: a list of layer numbers")
    return experts, frozenset(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense)
