"""Ragged batches and implementations under test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from metrale_kernels import KernelUnavailableError, Operations, RaggedBatch
from metrale_kernels.cpu import load_operations
from metrale_kernels.cpu.build import load_build
from metrale_kernels.cpu.operations import CpuOperations
from metrale_kernels.reference import ReferenceOperations
from torch import Tensor

REFERENCE = ReferenceOperations()


@lru_cache(maxsize=1)
def implementations() -> dict[str, Operations]:
    """Everything that runs on this CPU: the reference, the compiled one, and that without its instruction-set paths."""
    found: dict[str, Operations] = {"reference": REFERENCE}
    try:
        found["cpu"] = load_operations()
        found["cpu-portable"] = CpuOperations(load_build(portable=True))
    except KernelUnavailableError:
        pass
    return found


@dataclass(frozen=True)
class AttentionCase:
    """Some sequences' queries over a cache that holds all their keys and values."""

    query: Tensor
    keys: Tensor
    values: Tensor
    batch: RaggedBatch

    def rows(self, sequence: int) -> slice:
        starts = self.batch.query_starts.tolist()
        return slice(starts[sequence], starts[sequence + 1])


def attention_case(
    sequences: Sequence[tuple[int, int]],
    *,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """``sequences`` holds (query rows, context length) pairs. Slots that belong to nobody hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = random.Random(seed)
    counts = [-(-length // block_size) for _, length in sequences]
    total = sum(counts) + 2
    cache = torch.full((total, 2, key_heads, block_size, head_dim), float("nan"), dtype=dtype)
    blocks = list(range(total))
    shuffled.shuffle(blocks)
    tables = torch.full((len(sequences), max(counts) + 1), total - 1, dtype=torch.int32)
    query_rows, positions, starts = [], [], [0]
    for index, (rows, length) in enumerate(sequences):
        own = [blocks.pop() for _ in range(counts[index])]
        tables[index, : len(own)] = torch.tensor(own, dtype=torch.int32)
        # Drawn per sequence, so that its data do not depend on the others.
        own_generator = torch.Generator().manual_seed(seed * 1000 + length)
        keys_values = torch.randn(length, 2, key_heads, head_dim, generator=own_generator).to(dtype)
        for position in range(length):
            cache[own[position // block_size], :, :, position % block_size] = keys_values[position]
        queries = torch.randn(length, query_heads, head_dim, generator=own_generator).to(dtype)
        query_rows.append(queries[length - rows :])
        positions += range(length - rows, length)
        starts.append(starts[-1] + rows)
    # Row-strided, as a slice of a fused projection is.
    wide = torch.randn(starts[-1], query_heads * head_dim + 16, generator=generator).to(dtype)
    query = wide[:, 16:].view(starts[-1], query_heads, head_dim)
    query.copy_(torch.cat(query_rows))
    batch = RaggedBatch(
        positions=torch.tensor(positions),
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.tensor([length for _, length in sequences], dtype=torch.int32),
        block_tables=tables,
        state_reads=None,
        state_writes=None,
        max_query_rows=max(rows for rows, _ in sequences),
        max_context_length=max(length for _, length in sequences),
    )
    return AttentionCase(query, cache[:, 0], cache[:, 1], batch)


def attend(operations: Operations, case: AttentionCase, window: int | None = None) -> Tensor:
    scale = case.query.shape[2] ** -0.5
    return operations.attention(case.query, case.keys, case.values, case.batch, scale, window)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
