"""ModelConfig from GGUF metadata, by way of the config.json the file was converted from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models.config import ModelConfig
from metrale_async.models.config_fields import positive_float, positive_int, token_ids
from metrale_async.models.gguf_file import GgufFile
from metrale_async.models.gguf_quants import SUPPORTED_TYPES, dequantize
from metrale_async.models.rope import yarn_mscale

# Mistral checkpoints are converted under the name llama.
_MODEL_TYPES: Final[Mapping[str, str]] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
ROPE_DIVISORS: Final = "rope_freqs.weight"

# Metadata that changes what is computed, with the values that leave it unchanged.
_UNSUPPORTED_FEATURES: Final[Mapping[str, tuple[Any, ...]]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (1,),
    "embedding_scale": (1,),
    "residual_scale": (1,),
    "use_parallel_residual": (False,),
    "attention.scale": (),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (),
    "attention.temperature_length": (),
    "attention.temperature_scale": (),
    "attention.shared_kv_layers": (0,),
    "rope.scaling.alpha": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (),
    "rope.dimension_sections": (),
}


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Normalise the metadata of ``file``; biases and tied embeddings are told by which tensors it holds.

    Raises UnsupportedModelError for an architecture or feature without an implementation, CheckpointError for missing
    or contradictory metadata.
    """
    metadata = file.metadata
    if metadata.get("general.type", "model") != "model":
        raise UnsupportedModelError(f"{file.path.name} is a GGUF of type {metadata['general.type']!r}, not a model")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedModelError(
            f"{file.path.name} is one of {metadata['split.count']} parts of a split GGUF; merge them into one file"
        )
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(_MODEL_TYPES)}"
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, neutral in _UNSUPPORTED_FEATURES.items():
        if key in values and values[key] not in neutral:
            raise UnsupportedModelError(
                f"{file.path.name}: {prefix}{key} = {values[key]!r} asks for a feature that is not supported"
            )
    heads = positive_int(values, "attention.head_count")
    hidden_size = positive_int(values, "embedding_length")
    # More heads than features leave no size to assume, so it must be given.
    head_dim = positive_int(values, "attention.key_length", hidden_size // heads or None)
    if positive_int(values, "attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{file.path.name}: keys of {head_dim} and values of {values['attention.value_length']} are not supported"
        )
    rotary_dim = positive_int(values, "rope.dimension_count", head_dim)
    raw: dict[str, Any] = {
        "model_type": _MODEL_TYPES[architecture],
        "vocab_size": _vocab_size(file, values),
        "hidden_size": hidden_size,
        "intermediate_size": positive_int(values, "feed_forward_length"),
        "num_hidden_layers": positive_int(values, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": positive_int(values, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _shortest(positive_float(values, "attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": positive_int(values, "context_length"),
        "partial_rotary_factor": rotary_dim / head_dim,
        "rope_theta": _shortest(positive_float(values, "rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(values),
        "sliding_window": values.get("attention.sliding_window"),
        "use_sliding_window": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "llama" and raw["sliding_window"]:
        raw["model_type"] = "mistral"
    config = ModelConfig.from_hf(raw)
    return dataclasses.replace(
        config,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        eos_token_ids=_end_tokens(metadata),
        rope=dataclasses.replace(config.rope, frequency_divisors=_rope_divisors(file, rotary_dim)),
    )


def _shortest(value: float) -> float:
    """The decimal a float32 was written from (1e-05 rather than 9.99999974e-06), as config.json has it."""
    return float(str(np.float32(value)))


def _vocab_size(file: GgufFile, values: Mapping[str, Any]) -> int:
    """The embedding table's rows: ``vocab_size`` is absent from some files and counts no padding in others."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"missing from {file.path.name}: token_embd.weight")
    vocab_size = embedding.shape[0]
    tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if max(tokens, positive_int(values, "vocab_size", 1)) > vocab_size:
        raise CheckpointError(
            f"{file.path.name} names {max(tokens, values.get('vocab_size', 0))} tokens but embeds {vocab_size}"
        )
    return vocab_size


def _end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: end of sequence, of turn and of message."""
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        ids += token_ids(metadata, f"tokenizer.ggml.{name}_token_id")
    return tuple(dict.fromkeys(ids))


def _rope_scaling(values: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        factor = positive_float(values, "rope.scale_linear", 1.0)  # what files of 2023 call it
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    factor = _shortest(positive_float(values, "rope.scaling.factor", 1.0))
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    # ggml multiplies YaRN's own temperature by this, where config.json's attention_factor replaces it.
    temperature = positive_float(values, "rope.scaling.attn_factor", 1.0)
    temperature *= positive_float(values, "rope.scaling.yarn_attn_factor", 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": values.get("rope.scaling.original_context_length"),
        "beta_fast": values.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": values.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": temperature * yarn_mscale(factor),
    }


def _rope_divisors(file: GgufFile, rotary_dim: int) -> tuple[float, ...] | None:
    """Llama 3's frequency scaling, which the converter stores as a tensor of divisors."""
    tensor = file.tensors.get(ROPE_DIVISORS)
    if tensor is None:
        return None
    if tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"wrong shape: {ROPE_DIVISORS} in {file.path.name} is {list(tensor.shape)}, "
            f"the metadata asks for [{rotary_dim // 2}]"
        )
    if tensor.type not in SUPPORTED_TYPES:
        raise UnsupportedModelError(f"{ROPE_DIVISORS} in {file.path.name} has the unsupported type {tensor.type.name}")
    divisors = dequantize(torch.from_numpy(file.tensor_bytes(tensor)), tensor.type, torch.float32).tolist()
    if not all(np.isfinite(divisor) and divisor > 0 for divisor in divisors):
        raise CheckpointError(f"{ROPE_DIVISORS} in {file.path.name} holds a divisor that is not above 0")
    return tuple(divisors)
