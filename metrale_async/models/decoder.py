"""The pre-norm decoder: every family is this one, told apart by :class:`ModelConfig`.

A layer is a mixer (attention) and a feed-forward block, each added to the residual stream. ``forward`` consists of
calls to :class:`Operations` and views alone, so that a whole step can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from metrale_kernels.interface import Operations, RaggedBatch
from torch import Tensor, float32

from metrale_async.models.attention import Attention, attention_shapes, attention_states
from metrale_async.models.config import ModelConfig
from metrale_async.models.delta_net import GatedDeltaNet, delta_net_shapes, delta_net_states
from metrale_async.models.experts import ExpertMixture, experts_shapes
from metrale_async.models.interface import LayerState, PagedCache, PagedState, RecurrentState
from metrale_async.models.mlp import GatedMlp, mlp_shapes
from metrale_async.models.rope import rope_tables
from metrale_async.models.weights import WeightReader


class Mixer(Protocol):
    """The part of a layer that looks at other tokens, and so the part that keeps state."""

    @property
    def states(self) -> Sequence[LayerState]: ...

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]; one of ``caches`` per PagedState, one of ``states`` per RecurrentState."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's parts. ``input_norm`` and ``post_attention_norm`` are norm weights [hidden]."""

    input_norm: Tensor
    mixer: Mixer
    post_attention_norm: Tensor
    feed_forward: Callable[[Tensor], Tensor]
    paged_states: int
    recurrent_states: int


def decoder_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor a checkpoint of ``config`` must hold, by name, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (config.hidden_size,)
        if config.layer_types[layer] == "linear_attention":
            shapes.update(delta_net_shapes(config, f"{prefix}.linear_attn"))
        else:
            shapes.update(attention_shapes(config, f"{prefix}.self_attn"))
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (config.hidden_size,)
        block_shapes = experts_shapes if layer in config.sparse_layers else mlp_shapes
        shapes.update(block_shapes(config, f"{prefix}.mlp"))
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def decoder_states(config: ModelConfig, dtype: torch.dtype) -> Sequence[Sequence[LayerState]]:
    """The states each layer of a model computed in ``dtype`` keeps, known without its weights."""
    return [
        (delta_net_states if kind == "linear_attention" else attention_states)(config, dtype)
        for kind in config.layer_types
    ]


class Decoder:
    """A decoder with its weights; a :class:`CausalLanguageModel`."""

    def __init__(
        self, config: ModelConfig, weights: WeightReader, operations: Operations, max_sequence_tokens: int
    ) -> None:
        """Read the weights. Sequences may grow to ``max_sequence_tokens``: the rotary tables end there."""
        self.config = config
        self._operations = operations
        self._max_sequence_tokens = max_sequence_tokens
        rotary = rope_tables(config.rope, max_sequence_tokens, weights.device)
        self._embedding = weights.tensor("model.embed_tokens.weight")
        self._layers = [
            _build_layer(config, layer, weights, operations, rotary) for layer in range(config.num_hidden_layers)
        ]
        # Each norm is fused with the addition before it, so a layer ends with the norm that the next one starts with.
        final_norm = weights.norm("model.norm.weight", zero_centred=config.zero_centred_norms)
        self._next_norms = [*(layer.input_norm for layer in self._layers[1:]), final_norm]
        if config.tie_word_embeddings:
            self._lm_head = weights.pack([self._embedding], [None])
        else:
            self._lm_head = weights.linear("lm_head", bias=False)
        weights.finish()
        self._weight_bytes = weights.weight_bytes + sum(table.nbytes for table in rotary)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self._max_sequence_tokens

    @property
    def states(self) -> Sequence[Sequence[LayerState]]:
        return [layer.mixer.states for layer in self._layers]

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states after the final norm [T, hidden]; see CausalLanguageModel."""
        operations, eps = self._operations, self.config.rms_norm_eps
        residual = operations.embedding(token_ids, self._embedding)
        hidden = operations.rms_norm(residual, self._layers[0].input_norm, eps)
        first_cache = first_state = 0
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            end_cache = first_cache + layer.paged_states
            end_state = first_state + layer.recurrent_states
            mixed = layer.mixer(hidden, batch, caches[first_cache:end_cache], states[first_state:end_state])
            hidden = operations.add_rms_norm(mixed, residual, layer.post_attention_norm, eps)
            hidden = operations.add_rms_norm(layer.feed_forward(hidden), residual, next_norm, eps)
            first_cache, first_state = end_cache, end_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab_size]."""
        return self._operations.linear(hidden, self._lm_head, out_dtype=float32)


def _build_layer(
    config: ModelConfig, layer: int, weights: WeightReader, operations: Operations, rotary: tuple[Tensor, Tensor]
) -> DecoderLayer:
    prefix = f"model.layers.{layer}"
    mixer: Mixer
    if config.layer_types[layer] == "linear_attention":
        mixer = GatedDeltaNet(config, f"{prefix}.linear_attn", weights, operations)
    else:
        mixer = Attention(config, layer, f"{prefix}.self_attn", weights, operations, rotary)
    feed_forward: Callable[[Tensor], Tensor]
    if layer in config.sparse_layers:
        feed_forward = ExpertMixture(config, f"{prefix}.mlp", weights, operations)
    else:
        feed_forward = GatedMlp(f"{prefix}.mlp", weights, operations, bias=config.mlp_bias)
    zero_centred = config.zero_centred_norms
    return DecoderLayer(
        input_norm=weights.norm(f"{prefix}.input_layernorm.weight", zero_centred=zero_centred),
        mixer=mixer,
        post_attention_norm=weights.norm(f"{prefix}.post_attention_layernorm.weight", zero_centred=zero_centred),
        feed_forward=feed_forward,
        paged_states=sum(isinstance(state, PagedState) for state in mixer.states),
        recurrent_states=sum(isinstance(state, RecurrentState) for state in mixer.states),
    )
