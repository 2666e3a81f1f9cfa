"""The pool of KV blocks: who holds which, by reference count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockPoolStatistics:
    """Blocks by state; ``total = free + used``."""

    total: int
    free: int
    used: int


class BlockPool:
    """Reference counts over block ids ``0 .. num_blocks - 1``.

    A block is free while nobody refers to it. The pool knows nothing of what a block holds; a step in flight may still
    write into a block that was just freed, which is safe because the device runs steps in order and whoever gets the
    block next writes it in a later step.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self._references = [0] * num_blocks
        # Last freed, first reused: that block is the likeliest to be still in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, each with one reference. The caller has checked ``num_free``."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        if count == 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of ``blocks``, which must be held already."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference from each of ``blocks``; the last one frees the block."""
        # In reverse, so that a sequence's first blocks come out first when they are taken again.
        for block in reversed(blocks):
            references = self._references[block]
            if references == 0:
                raise ValueError(f"block {block} was released more often than it was taken")
            self._references[block] = references - 1
            if references == 1:
                self._free.append(block)

    def references(self, block: int) -> int:
        return self._references[block]

    def statistics(self) -> BlockPoolStatistics:
        free = len(self._free)
        return BlockPoolStatistics(total=self.num_blocks, free=free, used=self.num_blocks - free)

    def check(self, held: Iterable[int]) -> None:
        """Integrity: ``held`` lists every reference that exists, with repetitions. Raises AssertionError when wrong."""
        expected = [0] * self.num_blocks
        for block in held:
            expected[block] += 1
        assert expected == self._references, "references do not add up to their holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert free == {block for block, count in enumerate(expected) if count == 0}, (
            "the free list is not the free blocks"
        )
