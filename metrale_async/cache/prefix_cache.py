"""What the scheduler asks of a prefix cache, and the plain answer.

Sequences give their blocks back through the cache, because a block that is cached stays when its last sequence leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from metrale_async.cache.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix whose rows exist."""

    blocks: tuple[int, ...] = ()
    """Whole blocks, in order; the caller shares them before anything else happens to the pool."""
    partial_block: int | None = None
    """A block whose first ``partial_tokens`` tokens continue the prefix; it is to be copied, not shared."""
    partial_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PrefixCacheStatistics:
    """Gauges, and totals since the start."""

    cached_blocks: int = 0
    evictable_blocks: int = 0
    queries_total: int = 0
    hit_tokens_total: int = 0
    missed_tokens_total: int = 0
    evicted_blocks_total: int = 0
    recomputed_tokens_total: int = 0
    """Tokens computed again after a preemption, beyond what was still cached; neither hits nor misses."""


class PrefixCache(Protocol):
    """Rows of finished and running sequences, by the hash of their tokens (see block_hash.py)."""

    @property
    def is_enabled(self) -> bool:
        """Whether looking up and inserting can ever do anything."""
        ...

    @property
    def num_evictable(self) -> int:
        """Blocks that only the cache holds: what :meth:`evict` can free."""
        ...

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix of ``token_ids``, whose full blocks are named by ``hashes``."""
        ...

    def share(self, blocks: Sequence[int]) -> None:
        """A sequence takes references to blocks that somebody holds: matched ones, or another sequence's."""
        ...

    def insert(
        self, hashes: Sequence[bytes], token_ids: Sequence[int], blocks: Sequence[int], first: int
    ) -> Sequence[int]:
        """Publish full, computed blocks ``first ..`` of a sequence; ``hashes`` and ``blocks`` begin at its first block.

        Returns blocks that hold the same rows as some of the sequence's own, for which a reference was taken: it gives
        them back with its own. So whoever holds a cached block, directly or by a copy, holds the whole path to it.
        """
        ...

    def release(self, blocks: Sequence[int]) -> None:
        """A sequence lets go of its blocks."""
        ...

    def evict(self, count: int) -> int:
        """Free up to ``count`` blocks that nobody uses; returns how many were freed."""
        ...

    def count(self, *, hit_tokens: int, missed_tokens: int, recomputed_tokens: int) -> None:
        """Record what an admitted sequence got."""
        ...

    def statistics(self) -> PrefixCacheStatistics: ...

    def check(self) -> None:
        """Integrity. Raises AssertionError when wrong."""
        ...

    def held_blocks(self) -> Sequence[int]:
        """Every reference the cache holds in the pool."""
        ...


class NoPrefixCaching:
    """Nothing is ever found, nothing is kept."""

    is_enabled = False
    num_evictable = 0

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> PrefixMatch:
        return PrefixMatch()

    def share(self, blocks: Sequence[int]) -> None:
        self._pool.share(blocks)

    def insert(
        self, hashes: Sequence[bytes], token_ids: Sequence[int], blocks: Sequence[int], first: int
    ) -> Sequence[int]:
        return ()

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.release(blocks)

    def evict(self, count: int) -> int:
        return 0

    def count(self, *, hit_tokens: int, missed_tokens: int, recomputed_tokens: int) -> None:
        pass

    def statistics(self) -> PrefixCacheStatistics:
        return PrefixCacheStatistics()

    def check(self) -> None:
        pass

    def held_blocks(self) -> Sequence[int]:
        return ()
