"""Mixtures of experts in plain torch, on an implementation's own linear layers: how the reference does it.

An expert's rows are gathered, so that it computes only them; since a row's bits do not depend on its neighbours, it
does not matter which rows an expert gets together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from metrale_kernels.elementary import exp
from metrale_kernels.interface import ExpertWeights, Operations, PackedLinear


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Each expert's gate and up projections in one layer, and its down projection."""

    layers: tuple[tuple[PackedLinear, PackedLinear], ...]

    @property
    def nbytes(self) -> int:
        return sum(gate_up.nbytes + down.nbytes for gate_up, down in self.layers)


def pack(operations: Operations, experts: Iterable[ExpertWeights]) -> SeparateExperts:
    """See :meth:`Operations.pack_experts`."""
    return SeparateExperts(
        tuple(
            (
                operations.pack_linear([expert.gate, expert.up], [None, None]),
                operations.pack_linear([expert.down], [None]),
            )
            for expert in experts
        )
    )


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """See :meth:`Operations.route_experts`."""
    exponentials = exp(logits - logits.amax(dim=-1, keepdim=True))
    probabilities = exponentials / _row_sums(exponentials)
    # A stable sort puts the lower id first among equals; topk promises no order.
    ordered = torch.sort(probabilities, dim=-1, descending=True, stable=True).indices
    ids = ordered[:, :top_k].sort(dim=-1).values
    weights = probabilities.gather(1, ids)
    return ids, weights / _row_sums(weights) if normalise else weights


def apply(operations: Operations, x: Tensor, ids: Tensor, weights: Tensor, experts: SeparateExperts) -> Tensor:
    """See :meth:`Operations.apply_experts`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for index in torch.unique(ids).tolist():
        rows, places = torch.where(ids == index)
        gate_up, down = experts.layers[index]
        hidden = operations.silu_and_mul(operations.linear(x[rows], gate_up))
        total[rows] += operations.linear(hidden, down, torch.float32) * weights[rows, places, None]
    return total.to(x.dtype)


def _row_sums(x: Tensor) -> Tensor:
    """[T, E] -> [T, 1], column by column: a library's sum over one row may be split otherwise than over many."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total
