"""The operations a model is written in: one signature each, several implementations behind it.

Rules every implementation keeps on CPU (they carry the engine's promise that an answer does not depend on its
neighbours or on how a prompt was cut):

- a row's result has the same bits whatever the number of rows, its place among them, and what the others hold;
- attention adds over keys in an order fixed by absolute position, so prefill in one piece, prefill in chunks and decode
  agree bit for bit.

Shapes: T rows (tokens of all sequences in the step, packed), S sequences, H heads, D head size, N/K output/input
features. Tensors are contiguous unless said otherwise; "row-strided" means that ``stride(0)`` is free and the rest is
contiguous, so that slices of a fused projection need no copy. Activations are float32 or bfloat16, and all of one call
agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Which rows belong to which sequence, and where their keys and values live. All tensors on the model's device.

    Row r of sequence s is ``query_starts[s] <= r < query_starts[s + 1]``; the rows of a sequence are its newest tokens
    in order, so the last of them is position ``context_lengths[s] - 1``.
    """

    positions: Tensor
    """int64 [T], absolute position of each row in its sequence."""
    slots: Tensor
    """int64 [T], where a row's key and value go: block id * block size + offset in the block."""
    query_starts: Tensor
    """int32 [S + 1], starts at 0, ends at T."""
    context_lengths: Tensor
    """int32 [S], tokens of the sequence including this step's rows."""
    block_tables: Tensor
    """int32 [S, B], block ids in order of position; row-strided. Entries past a sequence's length may hold anything."""
    state_reads: Tensor | None
    """int64 [S], the place of each sequence's recurrent state before this step; None for models without such states."""
    state_writes: Tensor | None
    """int64 [S], the place its new state goes to, never the one it is read from: so a step can be run again."""
    max_query_rows: int
    """The most rows one sequence has in this batch."""
    max_context_length: int


class PackedLinear(Protocol):
    """Weights of one (possibly fused) linear layer in the layout an implementation likes best."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes read to apply the layer once."""
        ...


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """Constants of one gated delta net, float32."""

    conv: Tensor
    """[kernel, channels]: weight of the input ``kernel - 1 - j`` tokens back is row j."""
    rate: Tensor
    """[Hv]: -exp(A_log)."""
    bias: Tensor
    """[Hv]: dt_bias."""
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class DeltaStates:
    """One layer's states of all sequences, by place."""

    conv: Tensor
    """[places, kernel - 1, channels] in the activations' type: the newest inputs of the convolution."""
    recurrent: Tensor
    """float32 [places, Hv, Dk, Dv]."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's feed-forward block, down(silu(gate(x)) * up(x)): gate and up [I, N], down [N, I]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class PackedExperts(Protocol):
    """All experts of one layer in the layout an implementation likes best."""

    @property
    def nbytes(self) -> int: ...


class Operations(Protocol):
    """One implementation of every operation."""

    @property
    def name(self) -> str:
        """``reference``, ``cpu`` or ``triton``."""
        ...

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PackedLinear:
        """Pack weights [N_i, K] (stacked along N, in order) and biases [N_i] or None; inputs are not kept alive."""
        ...

    def linear(self, x: Tensor, weight: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, K] row-strided -> [T, N] in ``out_dtype`` (default: x's); float32 accumulation, bias added before
        rounding."""
        ...

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids int64 [T], table [V, K] -> [T, K]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, D] or [T, H, D], row-strided, normalised over D in float32 -> contiguous, same shape (Zhang & Sennrich
        2019).

        weight [D], in x's dtype: then the normalised value is rounded to x's dtype before it is scaled, as Llama does;
        or in float32: then it is scaled first and rounded once, as models with zero-centred norms do.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place (both [T, D]), then the rms_norm of the new residual -> [T, D]."""
        ...

    def rotary_(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotate query [T, Hq, D] and key [T, Hk, D] (row-strided) in place (RoFormer, half-split pairing as in Llama).

        cos, sin float32 [P, R/2] by position (already scaled where the config scales them); the first R <= D values of
        each head are rotated: pairs (i, i + R/2).
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 * N], gate first -> silu(gate) * up, [T, N]; silu in float32, rounded once at the end."""
        ...

    def sigmoid_and_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        """x [T, N] * sigmoid(gate), gate [T, N] or [T, 1], both row-strided; in float32, rounded once -> [T, N]."""
        ...

    def rms_norm_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(x) * silu(gate): x, gate [T, H, D], row-strided; weight [D] -> contiguous [T, H, D]."""
        ...

    def gated_delta_net(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, layer: DeltaLayer, batch: RaggedBatch, states: DeltaStates
    ) -> Tensor:
        """Convolution and gated delta rule (Yang, Kautz, Hatamizadeh 2024) of each sequence's rows -> [T, Hv, Dv].

        mixed [T, 2 * Hk * Dk + Hv * Dv] holds queries, keys and values before the convolution, beta and decay [T, Hv]
        the logits of the write strength and the inputs of the decay; all row-strided. Reads each sequence's state at
        ``batch.state_reads`` (zero for one whose first row is position 0) and writes the new one at ``state_writes``.
        Token by token in float32, so that the state after a token does not depend on how the tokens came.
        """
        ...

    def route_experts(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """logits float32 [T, E] -> ids int64 [T, top_k], ascending in each row, and their weights float32 [T, top_k]:
        softmax over all experts, the top_k largest (of equal ones the lower ids), divided by their sum if
        ``normalise``.
        """
        ...

    def pack_experts(self, experts: Iterable[ExpertWeights], count: int) -> PackedExperts:
        """Pack ``count`` experts of one size, in the order of their ids, each before the next is taken; none is kept
        alive."""
        ...

    def apply_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        """Mixture of experts (Shazeer et al. 2017): x [T, N] row-strided, ids and weights [T, top_k] as
        ``route_experts`` gives them -> [T, N], the weighted sum of each row's experts, added in float32 in the order
        of their ids and rounded once."""
        ...

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        """Store key, value [T, Hk, D] (row-strided) at ``slots`` of the caches [blocks, Hk, block size, D] (stride(0)
        free)."""
        ...

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """Causal attention of query [T, Hq, D] (row-strided) over the paged caches -> contiguous [T, Hq, D].

        Caches are [blocks, Hk, block size, D] with free stride(0); Hq is a multiple of Hk. A row at position p sees
        the keys at positions max(0, p - sliding_window + 1) .. p. This step's keys are already in the cache. Softmax
        in float32.
        """
        ...
