"""Grouped-query attention over paged keys and values (Ainslie et al. 2023), with rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from metrale_kernels.interface import Operations, PackedLinear, RaggedBatch
from torch import Tensor

from metrale_async.models.config import ModelConfig
from metrale_async.models.interface import LayerState, PagedCache, PagedState
from metrale_async.models.weights import WeightReader


def attention_shapes(config: ModelConfig, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of one attention's tensors in a checkpoint."""
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    # With an output gate the query projection gives each head's query, then its gate.
    query_rows = 2 * query if config.attention_gate else query
    for module, rows in (("q_proj", query_rows), ("k_proj", key_value), ("v_proj", key_value)):
        shapes[f"{prefix}.{module}.weight"] = (rows, config.hidden_size)
        if config.qkv_bias:
            shapes[f"{prefix}.{module}.bias"] = (rows,)
    shapes[f"{prefix}.o_proj.weight"] = (config.hidden_size, query)
    if config.output_bias:
        shapes[f"{prefix}.o_proj.bias"] = (config.hidden_size,)
    if config.query_key_norm:
        shapes[f"{prefix}.q_norm.weight"] = (config.head_dim,)
        shapes[f"{prefix}.k_norm.weight"] = (config.head_dim,)
    return shapes


def attention_states(config: ModelConfig, dtype: torch.dtype) -> Sequence[LayerState]:
    """What one layer keeps of a sequence."""
    return (PagedState(config.num_key_value_heads, config.head_dim, dtype),)


class Attention:
    """One layer's attention: fused projection, per-head norms if any, rotation, paged attention, output projection."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        prefix: str,
        weights: WeightReader,
        operations: Operations,
        rotary: tuple[Tensor, Tensor],
    ) -> None:
        self._operations = operations
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._scale = config.head_dim**-0.5
        self._window = config.window_of(layer)
        self._cos, self._sin = rotary
        self._has_gate = config.attention_gate
        self._qkv = _projection(config, prefix, weights)
        self._output = weights.linear(f"{prefix}.o_proj", bias=config.output_bias)
        self._norms: tuple[Tensor, Tensor] | None = None
        if config.query_key_norm:
            zero_centred = config.zero_centred_norms
            self._norms = (
                weights.norm(f"{prefix}.q_norm.weight", zero_centred=zero_centred),
                weights.norm(f"{prefix}.k_norm.weight", zero_centred=zero_centred),
            )
        self.states = attention_states(config, weights.dtype)

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]; writes this step's keys and values into the one cache."""
        operations, (cache,) = self._operations, caches
        query_size = self._heads * self._head_dim
        kv_size = self._kv_heads * self._head_dim
        qkv = operations.linear(hidden, self._qkv)
        query = qkv[:, :query_size].view(-1, self._heads, self._head_dim)
        key = qkv[:, query_size : query_size + kv_size].view(-1, self._kv_heads, self._head_dim)
        gate_start = query_size + 2 * kv_size
        value = qkv[:, query_size + kv_size : gate_start].view(-1, self._kv_heads, self._head_dim)
        if self._norms is not None:
            query_norm, key_norm = self._norms
            query = operations.rms_norm(query, query_norm, self._eps)
            key = operations.rms_norm(key, key_norm, self._eps)
        operations.rotary_(query, key, batch.positions, self._cos, self._sin)
        operations.write_kv(key, value, cache.keys, cache.values, batch.slots)
        attended = operations.attention(query, cache.keys, cache.values, batch, self._scale, self._window)
        result = attended.flatten(1)
        if self._has_gate:
            result = operations.sigmoid_and_mul(result, qkv[:, gate_start:])
        return operations.linear(result, self._output)


def _projection(config: ModelConfig, prefix: str, weights: WeightReader) -> PackedLinear:
    """Queries, keys, values, and the output gate if there is one, in one product."""
    modules = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
    if not config.attention_gate:
        return weights.linear(*modules, bias=config.qkv_bias)
    query, gate = _split_gate(weights.take(f"{modules[0]}.weight"), config)
    parts = [query, weights.take(f"{modules[1]}.weight"), weights.take(f"{modules[2]}.weight"), gate]
    biases: list[Tensor | None] = [None] * 4
    if config.qkv_bias:
        query_bias, gate_bias = _split_gate(weights.take(f"{modules[0]}.bias"), config)
        biases = [query_bias, weights.take(f"{modules[1]}.bias"), weights.take(f"{modules[2]}.bias"), gate_bias]
    return weights.pack(parts, biases)


def _split_gate(rows: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rows that hold, head by head, a query and then its gate."""
    by_head = rows.view(config.num_attention_heads, 2, config.head_dim, *rows.shape[1:])
    return by_head[:, 0].flatten(0, 1).contiguous(), by_head[:, 1].flatten(0, 1).contiguous()
