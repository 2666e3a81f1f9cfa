from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrale_async.cache import BlockPool, RadixPrefixCache, block_hashes, root_hash

BLOCK_SIZE = 2
NUM_BLOCKS = 14
ROOTS = [root_hash("model"), root_hash("model", salt="other")]
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class RadixCacheMachine(RuleBasedStateMachine):
    """Sequences match, compute, publish and leave in any order; a row is modelled by the tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = RadixPrefixCache(self.pool, BLOCK_SIZE)
        self.memory: dict[int, tuple[bytes, list[int]]] = {}
        self.running: list[list[int]] = []

    @rule(token_ids=tokens, root=st.sampled_from(ROOTS))
    def run_a_sequence(self, token_ids: list[int], root: bytes) -> None:
        names = block_hashes(root, token_ids, BLOCK_SIZE)
        match = self.cache.match(names, token_ids)
        self.cache.share(match.blocks)
        for index, block in enumerate(match.blocks):
            assert self.memory[block] == (root, token_ids[: (index + 1) * BLOCK_SIZE]), "a match holds other rows"
        length = len(match.blocks) * BLOCK_SIZE
        if match.partial_block is not None:
            source_root, rows = self.memory[match.partial_block]
            assert source_root == root
            assert rows[: length + match.partial_tokens] == token_ids[: length + match.partial_tokens]
        missing = -(-len(token_ids) // BLOCK_SIZE) - len(match.blocks)
        if missing > self.pool.num_free + self.cache.num_evictable:
            self.cache.release(match.blocks)
            return
        if missing > self.pool.num_free:
            wanted = missing - self.pool.num_free
            assert self.cache.evict(wanted) == wanted, "fewer blocks could be evicted than were said to be evictable"
        blocks = [*match.blocks, *self.pool.allocate(missing)]
        for index in range(len(match.blocks), len(blocks)):
            self.memory[blocks[index]] = (root, token_ids[: (index + 1) * BLOCK_SIZE])
        for index, block in self.cache.insert(names, token_ids, blocks, 0):
            assert self.memory[block] == self.memory[blocks[index]]
            self.cache.release((blocks[index],))
            blocks[index] = block
        self.running.append(blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.cache.release(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        possible = self.cache.num_evictable
        assert self.cache.evict(count) == min(count, possible)

    @invariant()
    def everything_adds_up(self) -> None:
        self.cache.check()
        held = [block for blocks in self.running for block in blocks]
        self.pool.check([*held, *self.cache.held_blocks()])


RadixCacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRadixCache = RadixCacheMachine.TestCase


def fill(cache: RadixPrefixCache, pool: BlockPool, token_ids: list[int], root: bytes = ROOTS[0]) -> list[int]:
    blocks = pool.allocate(len(token_ids) // BLOCK_SIZE)
    cache.insert(block_hashes(root, token_ids, BLOCK_SIZE), token_ids, blocks, 0)
    cache.release(blocks)
    return blocks


def test_what_was_used_longest_ago_is_evicted_first_and_leaves_before_their_parents() -> None:
    pool = BlockPool(8)
    cache = RadixPrefixCache(pool, BLOCK_SIZE)
    first, second = fill(cache, pool, [1, 1, 2, 2]), fill(cache, pool, [5, 5, 6, 6])
    names = block_hashes(ROOTS[0], [1, 1, 2, 2], BLOCK_SIZE)
    assert cache.match(names, [1, 1, 2, 2]).blocks == tuple(first)
    gone = []
    for _ in range(4):
        before = set(cache.held_blocks())
        assert cache.evict(1) == 1
        gone += before - set(cache.held_blocks())
    assert gone == [*reversed(second), *reversed(first)]


def test_blocks_of_a_running_sequence_are_never_evicted() -> None:
    pool = BlockPool(4)
    cache = RadixPrefixCache(pool, BLOCK_SIZE)
    blocks = fill(cache, pool, [1, 1, 2, 2])
    cache.share(blocks[:1])
    assert cache.evict(4) == 1
    assert cache.held_blocks() == blocks[:1]


def test_a_partial_match_is_the_longest_among_siblings() -> None:
    pool = BlockPool(32)
    cache = RadixPrefixCache(pool, 4)
    for tail in ([7, 7, 7, 7], [8, 9, 7, 7], [8, 9, 9, 7]):
        token_ids = [1, 2, 3, 4, *tail]
        blocks = pool.allocate(2)
        for index, block in cache.insert(block_hashes(ROOTS[0], token_ids, 4), token_ids, blocks, 0):
            cache.release((blocks[index],))
            blocks[index] = block
        cache.release(blocks)
        last = blocks[1]
    asked = [1, 2, 3, 4, 8, 9, 9]
    match = cache.match(block_hashes(ROOTS[0], asked, 4), asked)
    assert (len(match.blocks), match.partial_block, match.partial_tokens) == (1, last, 3)


def test_names_depend_on_everything_before_and_on_the_root() -> None:
    names = block_hashes(ROOTS[0], [1, 2, 3, 4, 5, 6, 7], 2)
    assert len(names) == 3
    assert names == block_hashes(ROOTS[0], [1, 2, 3, 4, 5, 6, 7], 2, known=names[:1])
    changed = block_hashes(ROOTS[0], [9, 2, 3, 4, 5, 6], 2)
    assert not set(names) & set(changed)
    assert not set(names) & set(block_hashes(ROOTS[1], [1, 2, 3, 4, 5, 6], 2))
    assert block_hashes(ROOTS[0], [], 2) == []
    assert all(a != b for a, b in pairwise(block_hashes(ROOTS[0], [0] * 40, 2)))


@pytest.mark.parametrize(("left", "right"), [(("a", "", ""), ("", "a", "")), (("ab", "c", ""), ("a", "bc", ""))])
def test_roots_are_unambiguous(left: tuple[str, str, str], right: tuple[str, str, str]) -> None:
    assert root_hash(*left) != root_hash(*right)
