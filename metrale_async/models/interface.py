"""What a loaded model is to the rest of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from metrale_kernels.interface import RaggedBatch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedState:
    """Rows that live in KV blocks: attention keys and values of one layer."""

    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """A fixed-size state per sequence that changes with every token."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class OpaqueState:
    """Anything else; a model with such a layer can be neither cached nor swapped."""

    reason: str


LayerState = PagedState | RecurrentState | OpaqueState


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One layer's view of the KV memory: keys and values [blocks, heads, block size, head_dim], stride(0) free."""

    keys: Tensor
    values: Tensor


class CausalLanguageModel(Protocol):
    """A decoder ready to run. Everything that saves, shares or moves a sequence works from ``states`` alone."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def states(self) -> Sequence[Sequence[LayerState]]:
        """The states each layer keeps, by layer."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held in memory."""
        ...

    def forward(
        self, token_ids: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        """token_ids int64 [T] -> hidden states after the final norm [T, hidden]; writes this step's keys and values.

        ``caches`` holds one entry per PagedState, in layer order, ``states`` one tensor [places, *shape] per
        RecurrentState: a sequence's state is read at ``batch.state_reads`` and its new state written at
        ``batch.state_writes``.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, vocab_size]."""
        ...
