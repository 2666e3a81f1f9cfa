"""Mixture of experts (Shazeer et al. 2017): a router picks a few feed-forward blocks for each token; in some families
one more block is applied to every token, behind a gate."""

from __future__ import annotations

from collections.abc import Mapping

from metrale_kernels.interface import Operations
from torch import Tensor, float32

from metrale_async.models.config import ModelConfig
from metrale_async.models.mlp import GatedMlp, gated_mlp_shapes
from metrale_async.models.weights import WeightReader


def experts_shapes(config: ModelConfig, prefix: str) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of one block's tensors in a checkpoint."""
    experts = config.experts
    assert experts is not None
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (experts.num_experts, config.hidden_size)}
    for index in range(experts.num_experts):
        shapes.update(gated_mlp_shapes(f"{prefix}.experts.{index}", config.hidden_size, experts.intermediate_size))
    if experts.shared_intermediate_size is not None:
        shared = experts.shared_intermediate_size
        shapes.update(gated_mlp_shapes(f"{prefix}.shared_expert", config.hidden_size, shared))
        shapes[f"{prefix}.shared_expert_gate.weight"] = (1, config.hidden_size)
    return shapes


class ExpertMixture:
    """One layer's experts."""

    def __init__(self, config: ModelConfig, prefix: str, weights: WeightReader, operations: Operations) -> None:
        assert config.experts is not None
        self._operations = operations
        self._config = config.experts
        # The router and the shared expert's gate read the same rows: one product gives both.
        has_shared = config.experts.shared_intermediate_size is not None
        gates = [f"{prefix}.gate", *([f"{prefix}.shared_expert_gate"] if has_shared else [])]
        self._router = weights.linear(*gates, bias=False)
        self._experts = weights.experts(f"{prefix}.experts", config.experts.num_experts)
        self._shared = GatedMlp(f"{prefix}.shared_expert", weights, operations, bias=False) if has_shared else None

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden] -> [T, hidden]."""
        operations, config = self._operations, self._config
        logits = operations.linear(hidden, self._router, float32)
        ids, weights = operations.route_experts(
            logits[:, : config.num_experts], config.experts_per_token, config.normalise_weights
        )
        mixed = operations.apply_experts(hidden, ids, weights, self._experts)
        if self._shared is None:
            return mixed
        gate = logits[:, config.num_experts :].to(hidden.dtype)
        return mixed.add_(operations.sigmoid_and_mul(self._shared(hidden), gate))
