"""Gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Mapping

from metrale_kernels.interface import Operations
from torch import Tensor

from metrale_async.models.config import ModelConfig
from metrale_async.models.weights import WeightReader


def mlp_shapes(config: ModelConfig, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of one block's tensors in a checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, rows, columns in (
        ("gate_proj", config.intermediate_size, config.hidden_size),
        ("up_proj", config.intermediate_size, config.hidden_size),
        ("down_proj", config.hidden_size, config.intermediate_size),
    ):
        shapes[f"{prefix}.{module}.weight"] = (rows, columns)
        if config.mlp_bias:
            shapes[f"{prefix}.{module}.bias"] = (rows,)
    return shapes


class GatedMlp:
    """down(silu(gate(x)) * up(x)), with gate and up fused into one product."""

    def __init__(self, config: ModelConfig, prefix: str, weights: WeightReader, operations: Operations) -> None:
        self._operations = operations
        self._gate_up = weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj", bias=config.mlp_bias)
        self._down = weights.linear(f"{prefix}.down_proj", bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        operations = self._operations
        return operations.linear(operations.silu_and_mul(operations.linear(hidden, self._gate_up)), self._down)
