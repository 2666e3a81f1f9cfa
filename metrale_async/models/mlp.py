"""Gated feed-forward block (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from collections.abc import Mapping

from metrale_kernels.interface import Operations
from torch import Tensor

from metrale_async.models.config import ModelConfig
from metrale_async.models.weights import WeightReader


def mlp_shapes(config: ModelConfig, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of one block's tensors in a checkpoint."""
    return gated_mlp_shapes(prefix, config.hidden_size, config.intermediate_size, bias=config.mlp_bias)


def gated_mlp_shapes(
    prefix: str, hidden_size: int, intermediate_size: int, *, bias: bool = False
) -> Mapping[str, tuple[int, ...]]:
    """The same for given sizes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, rows, columns in (
        ("gate_proj", intermediate_size, hidden_size),
        ("up_proj", intermediate_size, hidden_size),
        ("down_proj", hidden_size, intermediate_size),
    ):
        shapes[f"{prefix}.{module}.weight"] = (rows, columns)
        if bias:
            shapes[f"{prefix}.{module}.bias"] = (rows,)
    return shapes


class GatedMlp:
    """down(silu(gate(x)) * up(x)), with gate and up fused into one product."""

    def __init__(self, prefix: str, weights: WeightReader, operations: Operations, *, bias: bool) -> None:
        self._operations = operations
        self._gate_up = weights.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj", bias=bias)
        self._down = weights.linear(f"{prefix}.down_proj", bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        operations = self._operations
        return operations.linear(operations.silu_and_mul(operations.linear(hidden, self._gate_up)), self._down)
