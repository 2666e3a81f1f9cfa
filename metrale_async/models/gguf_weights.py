"""Weights of a GGUF file under their Hugging Face names, dequantised tensor by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models.config import ModelConfig
from metrale_async.models.gguf_config import ROPE_DIVISORS
from metrale_async.models.gguf_file import GgufFile
from metrale_async.models.gguf_quants import SUPPORTED_TYPES, dequantize
from metrale_async.models.weights import TensorEntry

_WHOLE_MODEL: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")


class GgufWeights:
    """A WeightSource over a GGUF file; ``rope_freqs`` is left out, since it is part of the configuration."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        # llama.cpp rotates neighbouring values under this name, so its converter reorders the rows of q and k.
        self._reordered = file.metadata["general.architecture"] == "llama"
        self._entries = {
            canonical_name(tensor.name): TensorEntry(
                tensor.shape, tensor.type.name, tensor.nbytes, file.path.name, tensor.name
            )
            for tensor in file.tensors.values()
            if tensor.name != ROPE_DIVISORS
        }
        if len(self._entries) < len(file.tensors) - 1:
            raise CheckpointError(f"{file.path.name} holds two tensors under one Hugging Face name")

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entries[name]
        tensor = self._file.tensors[entry.name_in_file]
        if tensor.type not in SUPPORTED_TYPES:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            raise UnsupportedModelError(
                f"tensor {tensor.name} in {entry.file} has the type {tensor.type.name}; supported: {supported}"
            )
        data = torch.from_numpy(self._file.tensor_bytes(tensor))
        values = dequantize(data, tensor.type, dtype).reshape(tensor.shape)
        if self._reordered and ".q_proj." in name:
            return _half_split(values, self._config.num_attention_heads, self._config)
        if self._reordered and ".k_proj." in name:
            return _half_split(values, self._config.num_key_value_heads, self._config)
        return values

    def close(self) -> None:
        """Nothing to do: the mapping goes with the last tensor view of it."""


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; names without one stay as they are and are refused as unused."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match is not None and match[2] in _PER_LAYER:
        return f"model.layers.{int(match[1])}.{_PER_LAYER[match[2]]}.{match[3]}"
    module, _, kind = name.rpartition(".")
    return f"{_WHOLE_MODEL[module]}.{kind}" if module in _WHOLE_MODEL else name


def _half_split(values: Tensor, heads: int, config: ModelConfig) -> Tensor:
    """Rows [heads * head_dim, ...] whose rotated pairs are (2i, 2i + 1) -> pairs (i, i + rotary_dim / 2)."""
    rotary_dim = config.rope.rotary_dim
    rows = values.reshape(heads, config.head_dim, -1)
    rotated = rows[:, :rotary_dim].reshape(heads, rotary_dim // 2, 2, -1).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, rows[:, rotary_dim:]), dim=1).reshape(values.shape)
