"""How large the KV cache becomes: pure arithmetic over what the machine has, and the reading of what it has."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from metrale_async.errors import ConfigurationError
from metrale_async.models import LayerState, PagedCache, PagedState, RecurrentState

GIB: Final = 2**30
AUTO_KV_SHARE: Final = 0.25
"""Share of the available memory the KV cache takes on CPU when nothing is asked for; the rest is the user's machine."""
AUTO_KV_MAX_BYTES: Final = 4 * GIB
AUTO_TOKENS_PER_SEQUENCE: Final = 512
"""KV tokens per sequence for which ``--max-batch-size auto`` provides."""
AUTO_MAX_BATCH_SIZE: Final = 128


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """What was chosen, for logs and ``doctor``."""

    num_blocks: int
    bytes_per_block: int

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def paged_states(states: Sequence[Sequence[LayerState]]) -> list[PagedState]:
    """The paged states of a model's layers, in layer order."""
    return [state for layer in states for state in layer if isinstance(state, PagedState)]


def bytes_per_block(states: Sequence[Sequence[LayerState]], block_size: int) -> int:
    return sum(state.bytes_per_token for state in paged_states(states)) * block_size


def cpu_kv_bytes(kv_cache_gb: float | None, available_bytes: int) -> int:
    """``--kv-cache-gb`` in bytes; auto is a quarter of the available memory, up to 4 GiB."""
    if kv_cache_gb is not None:
        return int(kv_cache_gb * GIB)
    return min(int(available_bytes * AUTO_KV_SHARE), AUTO_KV_MAX_BYTES)


def kv_cache_size(budget_bytes: int, block_bytes: int, *, most_useful_blocks: int) -> KVCacheSize:
    """Blocks within a budget, never more than could be used. Raises ConfigurationError if not even one fits."""
    blocks = min(budget_bytes // block_bytes, most_useful_blocks)
    if blocks < 1:
        raise ConfigurationError(
            f"the KV cache budget is {budget_bytes} bytes and one block takes {block_bytes}; "
            "raise --kv-cache-gb (CPU) or --gpu-memory-utilization (CUDA), or lower --block-size"
        )
    return KVCacheSize(num_blocks=blocks, bytes_per_block=block_bytes)


def auto_batch_size(kv_tokens: int) -> int:
    """Sequences that ``kv_tokens`` serve well."""
    return max(1, min(AUTO_MAX_BATCH_SIZE, kv_tokens // AUTO_TOKENS_PER_SEQUENCE))


def allocate_caches(
    states: Sequence[Sequence[LayerState]], num_blocks: int, block_size: int, device: torch.device
) -> list[PagedCache]:
    """The KV memory as one tensor, and each paged state's view of it.

    A block's rows of all layers lie side by side, so that a whole block is one contiguous piece for disk and peers.
    """
    paged = paged_states(states)
    dtypes = {state.dtype for state in paged}
    if len(dtypes) != 1:
        raise ConfigurationError(f"no KV memory layout for rows of the types {sorted(map(str, dtypes))}")
    dtype = dtypes.pop()
    elements = [state.heads * block_size * state.head_dim for state in paged]
    per_block = 2 * sum(elements)
    blocks = _zeros((num_blocks, per_block), dtype, device)
    caches = []
    offset = 0
    for state, count in zip(paged, elements, strict=True):
        shape = (num_blocks, state.heads, block_size, state.head_dim)
        keys = blocks[:, offset : offset + count].view(shape)
        values = blocks[:, offset + count : offset + 2 * count].view(shape)
        caches.append(PagedCache(keys, values))
        offset += 2 * count
    return caches


def recurrent_bytes(states: Sequence[Sequence[LayerState]]) -> int:
    """Bytes that the recurrent states of one running sequence take: two places, see ModelRunner."""
    return 2 * sum(math.prod(state.shape) * state.dtype.itemsize for state in recurrent_states(states))


def most_sequences(budget_bytes: int, sequence_bytes: int) -> int:
    """Sequences ``--max-batch-size auto`` never exceeds: their recurrent states may take half of the KV budget."""
    if sequence_bytes == 0:
        return AUTO_MAX_BATCH_SIZE
    return max(1, min(AUTO_MAX_BATCH_SIZE, budget_bytes // 2 // sequence_bytes))


def recurrent_states(states: Sequence[Sequence[LayerState]]) -> list[RecurrentState]:
    """The recurrent states of a model's layers, in layer order."""
    return [state for layer in states for state in layer if isinstance(state, RecurrentState)]


def allocate_states(states: Sequence[Sequence[LayerState]], places: int, device: torch.device) -> list[torch.Tensor]:
    """Memory for recurrent states, [places, *shape] each."""
    return [_zeros((places, *state.shape), state.dtype, device) for state in recurrent_states(states)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc: pages cost memory when they are first written, so a large pool does not slow the start.
    return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8)).view(dtype).view(shape)


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory a new program could take without swapping, within the control group's limit."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit_file, used_file = cgroup / "memory.max", cgroup / "memory.current"
    if limit_file.is_file() and used_file.is_file():
        limit = limit_file.read_text().strip()
        if limit.isdigit():
            available = min(available, max(0, int(limit) - int(used_file.read_text())))
    return available
