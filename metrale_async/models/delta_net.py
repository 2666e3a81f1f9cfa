"""Gated delta net (Yang, Kautz, Hatamizadeh 2024): a mixer whose memory is one matrix per head, not rows per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from metrale_kernels.interface import DeltaLayer, DeltaStates, Operations, RaggedBatch
from torch import Tensor

from metrale_async.models.config import DeltaConfig, ModelConfig
from metrale_async.models.interface import LayerState, PagedCache, RecurrentState
from metrale_async.models.weights import WeightReader


def delta_net_shapes(config: ModelConfig, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of one layer's tensors in a checkpoint."""
    delta = config.delta
    assert delta is not None
    value_size = delta.value_heads * delta.value_dim
    if delta.projections == "by head":
        projections = {"in_proj_qkvz": delta.channels + value_size, "in_proj_ba": 2 * delta.value_heads}
    else:
        projections = {
            "in_proj_qkv": delta.channels,
            "in_proj_z": value_size,
            "in_proj_b": delta.value_heads,
            "in_proj_a": delta.value_heads,
        }
    return {
        **{f"{prefix}.{name}.weight": (rows, config.hidden_size) for name, rows in projections.items()},
        f"{prefix}.conv1d.weight": (delta.channels, 1, delta.conv_kernel),
        f"{prefix}.dt_bias": (delta.value_heads,),
        f"{prefix}.A_log": (delta.value_heads,),
        f"{prefix}.norm.weight": (delta.value_dim,),
        f"{prefix}.out_proj.weight": (config.hidden_size, value_size),
    }


def delta_net_states(config: ModelConfig, dtype: torch.dtype) -> Sequence[LayerState]:
    """What one layer keeps of a sequence: the convolution's newest inputs, and a matrix per head."""
    delta = config.delta
    assert delta is not None
    return (
        RecurrentState((delta.conv_kernel - 1, delta.channels), dtype),
        RecurrentState((delta.value_heads, delta.key_dim, delta.value_dim), torch.float32),
    )


class GatedDeltaNet:
    """One layer: one projection for everything, convolution and recurrence, gated norm, output projection."""

    def __init__(self, config: ModelConfig, prefix: str, weights: WeightReader, operations: Operations) -> None:
        delta = config.delta
        assert delta is not None
        self._operations = operations
        self._delta = delta
        self._eps = config.rms_norm_eps
        # Queries, keys and values first: the convolution's channels; then the output gate, write strength and decay.
        if delta.projections == "by head":
            qkvz = _by_kind(weights.take(f"{prefix}.in_proj_qkvz.weight"), delta)
            gates = weights.take(f"{prefix}.in_proj_ba.weight").view(delta.key_heads, 2, -1, config.hidden_size)
            rows = [part.contiguous() for part in (*qkvz, gates[:, 0].flatten(0, 1), gates[:, 1].flatten(0, 1))]
            self._projection = weights.pack(rows, [None] * len(rows))
        else:
            self._projection = weights.linear(
                *(f"{prefix}.in_proj_{kind}" for kind in ("qkv", "z", "b", "a")), bias=False
            )
        self._layer = DeltaLayer(
            conv=weights.constant(f"{prefix}.conv1d.weight")[:, 0].T.contiguous(),
            rate=-weights.constant(f"{prefix}.A_log").exp(),
            bias=weights.constant(f"{prefix}.dt_bias"),
            key_heads=delta.key_heads,
            value_heads=delta.value_heads,
            key_dim=delta.key_dim,
            value_dim=delta.value_dim,
        )
        self._norm = weights.tensor(f"{prefix}.norm.weight")
        self._output = weights.linear(f"{prefix}.out_proj", bias=False)
        self.states = delta_net_states(config, weights.dtype)

    def __call__(
        self, hidden: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]; reads and writes the two states at the batch's places."""
        operations, delta = self._operations, self._delta
        conv, recurrent = states
        value_size = delta.value_heads * delta.value_dim
        projected = operations.linear(hidden, self._projection)
        gate_start, beta_start = delta.channels, delta.channels + value_size
        decay_start = beta_start + delta.value_heads
        read = operations.gated_delta_net(
            projected[:, :gate_start],
            projected[:, beta_start:decay_start],
            projected[:, decay_start:],
            self._layer,
            batch,
            DeltaStates(conv, recurrent),
        )
        gate = projected[:, gate_start:beta_start].view(-1, delta.value_heads, delta.value_dim)
        normed = operations.rms_norm_gated(read, gate, self._norm, self._eps)
        return operations.linear(normed.flatten(1), self._output)


def _by_kind(weight: Tensor, delta: DeltaConfig) -> list[Tensor]:
    """The rows of the projection, which lie by key head (its query, key, values and output gates), sorted by kind."""
    value_rows = delta.value_heads // delta.key_heads * delta.value_dim
    by_head = weight.view(delta.key_heads, -1, weight.shape[1])
    sizes = [delta.key_dim, delta.key_dim, value_rows, value_rows]
    parts: Sequence[Tensor] = by_head.split(sizes, dim=1)  # type: ignore[no-untyped-call]
    return [part.flatten(0, 1) for part in parts]
