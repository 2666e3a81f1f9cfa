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

from collections.abc import Sequence
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

        weight [D], in x's dtype; the normalised value is rounded to x's dtype before it is scaled, as in transformers.
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
