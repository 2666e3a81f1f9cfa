"""What config.json may say, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models import ModelConfig
from tests.models.tiny import CONFIG

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read(model_type: str = "llama", **changes: Any) -> ModelConfig:
    raw = {**CONFIG, "model_type": model_type, "architectures": [ARCHITECTURES.get(model_type, "X")], **changes}
    return ModelConfig.from_hf({key: value for key, value in raw.items() if value is not ...})


def test_a_plain_llama_is_read_as_it_says() -> None:
    config = read()
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.layer_types == ("full_attention", "full_attention")
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias or config.query_key_norm)
    assert config.eos_token_ids == (2,)
    assert config.max_position_embeddings == 128


def test_head_size_is_explicit_or_follows_from_the_hidden_size_or_the_family() -> None:
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None).head_dim == 8
    assert read("qwen3").head_dim == 128
    with pytest.raises(CheckpointError, match="hidden_size 34 is not a multiple"):
        read(hidden_size=34)


def test_missing_key_value_heads_mean_one_per_query_head() -> None:
    assert read(num_key_value_heads=None).num_key_value_heads == 4
    assert read(num_key_value_heads=...).num_key_value_heads == 4


@pytest.mark.parametrize("layers", [1, 4095, 4096])
def test_any_number_of_layers_up_to_the_limit_is_read(layers: int) -> None:
    assert len(read(num_hidden_layers=layers).layer_types) == layers


def test_biases_follow_the_family() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases(read(attention_bias=True)) == (True, True, False)
    assert biases(read(mlp_bias=True)) == (False, False, True)
    assert biases(read("qwen2")) == (True, False, False)
    assert biases(read("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(read("mistral")) == (False, False, False)
    assert read("qwen3").query_key_norm


@pytest.mark.parametrize(("value", "ids"), [(2, (2,)), ([5, 2, 5], (5, 2)), (None, ()), (..., ())])
def test_one_several_or_no_end_tokens(value: Any, ids: tuple[int, ...]) -> None:
    assert read(eos_token_id=value).eos_token_ids == ids


def windows(config: ModelConfig) -> list[int | None]:
    return [config.window_of(layer) for layer in range(config.num_hidden_layers)]


def test_every_mistral_layer_has_the_window_or_none_does() -> None:
    assert windows(read("mistral", sliding_window=16)) == [16, 16]
    assert windows(read("mistral", sliding_window=None)) == [None, None]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_are_off_unless_used_and_then_per_layer(family: str) -> None:
    assert windows(read(family, sliding_window=16)) == [None, None]
    assert windows(read(family, sliding_window=16, use_sliding_window=True, max_window_layers=0)) == [16, 16]
    assert windows(read(family, sliding_window=16, use_sliding_window=True, max_window_layers=1)) == [None, 16]
    assert windows(read(family, sliding_window=16, use_sliding_window=True, max_window_layers=2)) == [None, None]
    explicit = ["sliding_attention", "full_attention"]
    config = read(family, sliding_window=16, use_sliding_window=True, layer_types=explicit)
    assert windows(config) == [16, None]
    with pytest.raises(CheckpointError, match="no sliding_window is in use"):
        read(family, sliding_window=16, use_sliding_window=False, layer_types=explicit)


@pytest.mark.parametrize("model_type", ["gpt2", "deepseek_v3", None, 7, ["llama"]])
def test_an_unknown_model_type_is_refused_by_name_with_the_known_ones(model_type: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="supported: llama, mistral, qwen2, qwen3") as raised:
        read(model_type=model_type) if isinstance(model_type, str) else ModelConfig.from_hf({"model_type": model_type})
    assert repr(model_type) in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("llama", {"sliding_window": 16}, "sliding_window = 16"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mistral", {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope'"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, "rope type"),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope type 'mrope'"),
        ("llama", {"rope_parameters": {"mrope_section": [1, 2]}}, "mrope_section"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
    ],
    ids=str,
)
def test_a_feature_without_an_implementation_is_refused_by_name(
    family: str, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        read(family, **changes)
    assert named in str(raised.value)


def test_neutral_values_of_unsupported_features_are_accepted() -> None:
    read(
        quantization_config=None,
        attn_logit_softcapping=None,
        num_local_experts=0,
        use_mrope=False,
        residual_multiplier=1.0,
        hidden_act="swish",
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -32}, "hidden_size is -32"),
        ({"hidden_size": 2**31}, "hidden_size is 2147483648"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": 32.5}, "hidden_size is 32.5"),
        ({"num_hidden_layers": []}, "num_hidden_layers"),
        ({"num_hidden_layers": 4097}, "allowed: an integer from 1 to 4096"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_a_missing_or_wrong_value_is_refused_with_its_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        read(**changes)
    assert named in str(raised.value)


HYBRID: dict[str, Any] = {
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_hidden_layers": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
ARCHITECTURES |= {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def hybrid(model_type: str = "qwen3_next", **changes: Any) -> ModelConfig:
    return read(model_type, **{**HYBRID, **changes})


def test_a_hybrid_is_read_as_it_says() -> None:
    config = hybrid(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12, linear_value_head_dim=20)
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert config.attention_gate and config.zero_centred_norms and config.query_key_norm
    assert config.rope.rotary_dim == 2
    assert config.delta is not None and config.experts is not None
    assert config.delta.channels == 2 * 2 * 12 + 6 * 20
    assert (config.delta.conv_kernel, config.delta.projections) == (4, "by head")
    assert (config.experts.num_experts, config.experts.experts_per_token) == (6, 2)
    assert config.experts.normalise_weights
    assert config.sparse_layers == frozenset(range(8))


def test_which_layers_have_experts() -> None:
    assert hybrid("qwen3_moe", decoder_sparse_step=2).sparse_layers == {1, 3, 5, 7}
    assert hybrid("qwen3_moe", mlp_only_layers=[0, 3]).sparse_layers == {1, 2, 4, 5, 6, 7}
    assert not hybrid("qwen3_moe").experts.normalise_weights  # type: ignore[union-attr]
    # Only a layer without experts needs to know how wide it is.
    assert hybrid("qwen3_5_moe_text", intermediate_size=...).intermediate_size == 0
    with pytest.raises(CheckpointError, match="intermediate_size is missing"):
        hybrid(mlp_only_layers=[1], intermediate_size=...)


def test_layers_with_attention_are_named_or_evenly_spaced() -> None:
    assert hybrid(full_attention_interval=3).layer_types.count("full_attention") == 2
    named = ["full_attention"] + ["linear_attention"] * 7
    assert hybrid(layer_types=named, full_attention_interval=3).layer_types == tuple(named)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_beside_images_is_read_from_its_own_part(model_type: str) -> None:
    experts = {} if model_type == "qwen3_5" else HYBRID
    flat_type = f"{model_type}_text"
    text = {**CONFIG, **experts, "model_type": flat_type, "eos_token_id": 7, "tie_word_embeddings": False}
    del text["architectures"]
    whole = {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], "vision_config": {"depth": 1}}
    flat = ModelConfig.from_hf(text)
    nested = ModelConfig.from_hf({**whole, "text_config": text})
    assert nested.model_type == model_type
    assert (nested.layer_types, nested.eos_token_ids, nested.text_prefix) == (flat.layer_types, (7,), flat.text_prefix)
    # What the whole checkpoint says goes before its part, as in the class that has both.
    assert ModelConfig.from_hf({**whole, "text_config": text, "tie_word_embeddings": True}).tie_word_embeddings
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        ModelConfig.from_hf({**whole, "text_config": text, "quantization_config": {"bits": 4}})
    with pytest.raises(UnsupportedModelError, match="text_config has the model type 'llama'"):
        ModelConfig.from_hf({**whole, "text_config": {**text, "model_type": "llama"}})
    with pytest.raises(CheckpointError, match="text_config is 3; allowed: an object"):
        ModelConfig.from_hf({**whole, "text_config": 3})


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 4}, "4 is not a multiple of"),
        ("qwen3_next", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7; allowed: an integer from 1 to 6"),
        ("qwen3_next", {"num_experts": None}, "num_local_experts is missing"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid", "num_experts": None}, "output_gate_type = 'sigmoid'"),
        ("qwen3_5_text", {}, "num_experts = 6 asks"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 7}, "layer_types must name the type of each of the 8"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 8}, "layer type 'sliding_attention'"),
        ("qwen3_next", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        ("qwen3_next", {"rope_scaling": {"mrope_section": [1, 1, 1]}}, "mrope_section"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval is 0"),
        ("qwen3_next", {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
    ],
)
def test_a_hybrid_that_cannot_be_is_refused_by_name(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        hybrid(model_type, **changes)
