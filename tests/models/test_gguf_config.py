"""GGUF metadata and tensors: what is read from them, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from metrale_kernels.interface import Operations

from metrale_async.errors import CheckpointError, ModelError, UnsupportedModelError
from metrale_async.models import load_config, resolve_model
from metrale_async.models.config import ModelConfig
from tests.models.tiny import CONFIG, GGUF_NAMES, load, tiny_tensors, write_gguf


def gguf_tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tiny model's tensors by GGUF name; None takes one away."""
    tensors: dict[str, torch.Tensor | None] = {GGUF_NAMES[name]: tensor for name, tensor in tiny_tensors().items()}
    tensors |= changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def read(path: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: Any) -> ModelConfig:
    return load_config(resolve_model(str(write_gguf(path / "tiny.gguf", tensors, **metadata))))


def test_metadata_says_the_same_as_the_config_it_was_made_from(tmp_path: Path) -> None:
    assert read(tmp_path) == ModelConfig.from_hf(CONFIG)


def test_end_tokens_are_those_of_sequence_turn_and_message(tmp_path: Path) -> None:
    config = read(tmp_path, **{"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2})
    assert config.eos_token_ids == (2, 7)


def test_a_file_without_an_output_matrix_is_tied(tmp_path: Path) -> None:
    assert read(tmp_path, gguf_tensors(**{"output.weight": None})).tie_word_embeddings


def test_biases_are_told_by_their_tensors(tmp_path: Path) -> None:
    config = read(
        tmp_path, gguf_tensors(**{"blk.0.attn_q.bias": torch.zeros(32), "blk.0.ffn_up.bias": torch.zeros(64)})
    )
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, True)


def test_a_llama_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    config = read(tmp_path, **{"llama.attention.sliding_window": 16})
    assert (config.model_type, config.window_of(0)) == ("mistral", 16)


def test_rope_scaling_is_read_in_each_spelling(tmp_path: Path) -> None:
    def scaled(**values: Any) -> ModelConfig:
        return read(tmp_path, **{f"llama.rope.{key}": value for key, value in values.items()})

    assert scaled(scale_linear=4.0).rope.kind == "linear"
    linear = scaled(**{"scaling.type": "linear", "scaling.factor": 4.0})
    assert (linear.rope.kind, linear.rope.factor, linear.max_position_embeddings) == ("linear", 4.0, 512)
    yarn = scaled(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64})
    from_hf = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert yarn.rope == ModelConfig.from_hf({**CONFIG, "rope_scaling": from_hf}).rope
    warmer = scaled(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 2.0})
    assert warmer.rope.attention_factor == pytest.approx(2 * yarn.rope.attention_factor)
    divided = read(tmp_path, gguf_tensors(**{"rope_freqs.weight": torch.tensor([1.0, 2.0, 4.0, 8.0])}))
    assert divided.rope.frequency_divisors == (1.0, 2.0, 4.0, 8.0)


def test_a_padded_vocabulary_is_as_large_as_its_embedding(tmp_path: Path) -> None:
    assert read(tmp_path, **{"llama.vocab_size": 48}).vocab_size == 50


def test_a_partial_rotation_reorders_the_rotated_rows_alone(tmp_path: Path, operations: Operations) -> None:
    from metrale_async.models.gguf_file import GgufFile
    from metrale_async.models.gguf_weights import GgufWeights

    path = write_gguf(tmp_path / "partial.gguf", **{"llama.rope.dimension_count": 4})
    weights = GgufWeights(GgufFile(path), load_config(resolve_model(str(path))))
    stored = tiny_tensors()["model.layers.0.self_attn.k_proj.weight"]
    rows = [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]
    read_rows = weights.read("model.layers.0.self_attn.k_proj.weight", torch.float32)
    assert torch.equal(read_rows, stored[rows])
    value = weights.read("model.layers.0.self_attn.v_proj.weight", torch.float32)
    assert torch.equal(value, tiny_tensors()["model.layers.0.self_attn.v_proj.weight"])
    load(path, operations)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(None, torch.float32), (Type.F16, torch.bfloat16), (Type.BF16, torch.bfloat16), (Type.Q8_0, torch.bfloat16)],
    ids=str,
)
def test_quantised_and_16_bit_files_are_computed_in_bfloat16(
    kind: Type | None, dtype: torch.dtype, tmp_path: Path, operations: Operations
) -> None:
    kinds = {} if kind is None else {name: kind for name, tensor in gguf_tensors().items() if tensor.dim() == 2}
    assert load(write_gguf(tmp_path / "m.gguf", kinds=kinds), operations).dtype is dtype
    assert load(tmp_path / "m.gguf", operations, "float32").dtype is torch.float32


REFUSED: dict[str, tuple[dict[str, Any], type[ModelError], tuple[str, ...]]] = {
    "an unknown architecture": ({"architecture": "gemma3"}, UnsupportedModelError, ("'gemma3'", "llama, qwen2, qwen3")),
    "an adapter": ({"general.type": "adapter"}, UnsupportedModelError, ("'adapter'",)),
    "one part of several": ({"split.count": 3}, UnsupportedModelError, ("3 parts",)),
    "experts": ({"llama.expert_count": 8}, UnsupportedModelError, ("llama.expert_count = 8",)),
    "a logit scale": ({"llama.logit_scale": 0.5}, UnsupportedModelError, ("llama.logit_scale",)),
    "attention that is not causal": ({"llama.attention.causal": False}, UnsupportedModelError, ("attention.causal",)),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, ("'longrope'",)),
    "heads per layer": ({"llama.attention.head_count": [4, 4]}, CheckpointError, ("attention.head_count",)),
    "no layer count": ({"llama.block_count": None}, CheckpointError, ("block_count is missing",)),
    "a layer too many in the metadata": ({"llama.block_count": 3}, CheckpointError, ("missing", "model.layers.2")),
    "a layer too few in the metadata": ({"llama.block_count": 1}, CheckpointError, ("no use for", "blk.1.")),
    "another size": ({"llama.embedding_length": 64}, CheckpointError, ("wrong shape", "token_embd.weight", "[50, 32]")),
    "values of another size": ({"llama.attention.value_length": 16}, UnsupportedModelError, ("8", "16")),
    "more tokens than rows": ({"llama.vocab_size": 51}, CheckpointError, ("51 tokens", "50")),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, CheckpointError, ("token_embd.weight",)),
    "a missing tensor": ({"tensors": {"blk.1.ffn_up.weight": None}}, CheckpointError, ("model.layers.1.mlp.up_proj",)),
    "an unused tensor": ({"tensors": {"blk.0.attn_sinks.weight": torch.zeros(4)}}, CheckpointError, ("attn_sinks",)),
    "query norms in a llama": (
        {"tensors": {"blk.0.attn_q_norm.weight": torch.zeros(8)}},
        CheckpointError,
        ("attn_q_norm",),
    ),
    "a bias in one layer alone": (
        {"tensors": {"blk.1.attn_q.bias": torch.zeros(32)}},
        CheckpointError,
        ("blk.1.attn_q.bias",),
    ),
    "a wrong shape": (
        {"tensors": {"blk.0.attn_k.weight": torch.zeros(32, 32)}},
        CheckpointError,
        ("blk.0.attn_k.weight", "[32, 32]", "[16, 32]"),
    ),
    "frequency divisors of a wrong length": (
        {"tensors": {"rope_freqs.weight": torch.ones(5)}},
        CheckpointError,
        ("rope_freqs.weight", "[5]", "[4]"),
    ),
    "a frequency divisor of zero": (
        {"tensors": {"rope_freqs.weight": torch.zeros(4)}},
        CheckpointError,
        ("rope_freqs",),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_that_cannot_be_served_is_refused_by_name(what: str, tmp_path: Path, operations: Operations) -> None:
    changes, error, named = REFUSED[what]
    options = dict(changes)
    tensors = gguf_tensors(**options.pop("tensors", {}))
    path = write_gguf(tmp_path / "tiny.gguf", tensors, **options)
    with pytest.raises(error) as raised:
        load(path, operations)
    for part in named:
        assert part in str(raised.value)


@pytest.mark.parametrize("kind", [Type.TQ2_0, Type.IQ4_NL, Type.Q2_K, Type.F64], ids=lambda kind: kind.name)
def test_a_tensor_type_without_an_implementation_is_refused_by_name(
    kind: Type, tmp_path: Path, operations: Operations
) -> None:
    import struct

    path = write_gguf(tmp_path / "tiny.gguf", **{"llama.feed_forward_length": 256}, tensors=_wide())
    content = bytearray(path.read_bytes())
    # Overwrite the type number in the tensor table: only the name matters, the data is never read.
    name = b"blk.1.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = struct.pack("<I", kind)
    path.write_bytes(content + bytes(2**20))
    with pytest.raises(
        UnsupportedModelError, match=rf"blk\.1\.ffn_down\.weight in tiny\.gguf has the type {kind.name}"
    ):
        load(path, operations)


def _wide() -> dict[str, torch.Tensor]:
    tensors = gguf_tensors()
    for layer in range(2):
        tensors[f"blk.{layer}.ffn_gate.weight"] = torch.zeros(256, 32)
        tensors[f"blk.{layer}.ffn_up.weight"] = torch.zeros(256, 32)
        tensors[f"blk.{layer}.ffn_down.weight"] = torch.zeros(32, 256)
    return tensors
