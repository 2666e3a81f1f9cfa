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
    snapshot: int | None = None
    """Where the recurrent states after the last whole block lie; for models that have such states."""
    known_blocks: int = 0
    """Whole blocks whose rows exist, usable or not: beyond ``blocks`` if no snapshot reaches as far."""


@dataclass(frozen=True, slots=True)
class PrefixCacheStatistics:
    """Gauges, and totals since the start."""

    cached_blocks: int = 0
    evictable_blocks: int = 0
    queries_total: int = 0
    hit_tokens_total: int = 0
    missed_tokens_total: int = 0
    evicted_blocks_total: int = 0
    snapshots: int = 0
    snapshot_hits_total: int = 0
    snapshots_taken_total: int = 0
    snapshots_evicted_total: int = 0
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
    ) -> Sequence[tuple[int, int]]:
        """Publish full, computed blocks ``first ..`` of a sequence; ``hashes`` and ``blocks`` begin at its first block.

        Returns (index, block) for each of them that is known already in another block: a reference to that one was
        taken, and the sequence uses it from now on instead of its own, which holds the same rows. So whoever holds a
        cached block holds the whole path to it, and nothing is held twice.
        """
        ...

    def reserve_snapshot(self) -> int | None:
        """A place for a snapshot that is about to be taken; that of the least useful one if none is free."""
        ...

    def keep_snapshot(self, name: bytes, place: int) -> None:
        """The states after the block ``name`` lie at a reserved place.

        Without such a block, or if it has a snapshot, the place is free again.
        """
        ...

    def drop_snapshot(self, place: int) -> None:
        """A reserved place was not used."""
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
    ) -> Sequence[tuple[int, int]]:
        return ()

    def reserve_snapshot(self) -> int | None:
        return None

    def keep_snapshot(self, name: bytes, place: int) -> None:
        raise AssertionError("nothing was reserved")

    def drop_snapshot(self, place: int) -> None:
        raise AssertionError("nothing was reserved")

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
