from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrale_async.cache import BlockPool

NUM_BLOCKS = 12


class BlockPoolMachine(RuleBasedStateMachine):
    """Any order of taking, sharing and releasing keeps references equal to holders."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        free = self.pool.num_free
        if count > free:
            with pytest.raises(ValueError, match=f"{count} blocks asked for, {free} free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & {block for holder in self.holders for block in holder}
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = list(data.draw(st.sampled_from(self.holders)))
        self.pool.share(blocks)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @invariant()
    def references_are_holders(self) -> None:
        self.pool.check(block for holder in self.holders for block in holder)
        statistics = self.pool.statistics()
        assert statistics.used == len({block for holder in self.holders for block in holder})
        assert statistics.free + statistics.used == statistics.total == NUM_BLOCKS


TestBlockPool = BlockPoolMachine.TestCase


def test_a_block_released_once_too_often_is_refused() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="is free"):
        pool.share([0])


def test_the_integrity_check_notices_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="do not add up"):
        pool.check([])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
