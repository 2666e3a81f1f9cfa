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
