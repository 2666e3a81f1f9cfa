"""The prefix cache: a radix tree whose edges are full blocks of tokens.

A node is a block, named by the chained hash of everything up to its end (block_hash.py); its tokens are kept and
compared, so a collision is a miss. The cache holds one reference to each node's block. A node can be evicted when
nobody else refers to its block and it has no children; of those the one goes first that was used longest ago. They lie
in a heap with outdated entries left in place: an entry counts only if it still says when its node was last used, so
looking up, releasing and evicting cost O(log n) a block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from metrale_async.cache.block_pool import BlockPool
from metrale_async.cache.prefix_cache import PrefixCacheStatistics, PrefixMatch

MAX_SIBLINGS_COMPARED: Final = 64
"""Blocks below one node that are looked at for a partial match; the newest come first."""


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """For models whose layers keep recurrent states: a prefix can be used only where a snapshot of them was taken."""

    places: int
    """Snapshots there is memory for (``--ssm-cache-slots``); with 0 every hit recomputes."""
    min_tokens: int
    """A snapshot at a smaller depth is not used (``--marconi-min-tokens``)."""


class _Node:
    """One cached block."""

    __slots__ = ("block", "children", "last_used", "name", "parent", "snapshot", "tokens")

    def __init__(self, name: bytes, tokens: tuple[int, ...], block: int, parent: _Node | None) -> None:
        self.name = name
        self.tokens = tokens
        self.block = block
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.last_used = 0
        self.snapshot: int | None = None


class RadixPrefixCache:
    """See PrefixCache for the contract. Pure bookkeeping over a block pool."""

    is_enabled = True

    def __init__(self, pool: BlockPool, block_size: int, snapshots: SnapshotLimits | None = None) -> None:
        """``snapshots`` is None for models whose whole state lies in KV blocks."""
        self._snapshots = snapshots
        self._free_places = list(range(snapshots.places)) if snapshots is not None else []
        self._reserved: set[int] = set()
        self._with_snapshot: dict[int, _Node] = {}
        """By place."""
        self._snapshot_hits = self._snapshots_taken = self._snapshots_evicted = 0
        self._pool = pool
        self._block_size = block_size
        self._nodes: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._tops: dict[bytes, _Node] = {}
        """Nodes without a parent, of all roots."""
        self._heap: list[tuple[int, int, bytes]] = []
        self._clock = 0
        self._evictable = 0
        self._queries = self._hit_tokens = self._missed_tokens = self._recomputed_tokens = self._evicted = 0

    @property
    def num_evictable(self) -> int:
        return self._evictable

    def match(self, hashes: Sequence[bytes], token_ids: Sequence[int]) -> PrefixMatch:
        self._clock += 1
        size = self._block_size
        last: _Node | None = None
        blocks: list[int] = []
        for index, name in enumerate(hashes):
            node = self._nodes.get(name)
            if node is None or node.tokens != tuple(token_ids[index * size : (index + 1) * size]):
                break
            node.last_used = self._clock
            blocks.append(node.block)
            last = node
        if self._snapshots is not None:
            return self._at_snapshot(last, blocks)
        partial, length = self._partial(last, token_ids[len(blocks) * size : (len(blocks) + 1) * size])
        return PrefixMatch(tuple(blocks), None if partial is None else partial.block, length, known_blocks=len(blocks))

    def insert(
        self, hashes: Sequence[bytes], token_ids: Sequence[int], blocks: Sequence[int], first: int
    ) -> Sequence[tuple[int, int]]:
        self._clock += 1
        size = self._block_size
        known_elsewhere: list[tuple[int, int]] = []
        for index in range(first, min(len(hashes), len(blocks))):
            name = hashes[index]
            known = self._nodes.get(name)
            if known is not None:
                if known.block != blocks[index]:
                    self.share((known.block,))
                    known_elsewhere.append((index, known.block))
                continue
            parent = self._nodes[hashes[index - 1]] if index else None
            node = _Node(name, tuple(token_ids[index * size : (index + 1) * size]), blocks[index], parent)
            node.last_used = self._clock
            self._nodes[name] = self._by_block[node.block] = node
            (self._tops if parent is None else parent.children)[name] = node
            self._pool.share((node.block,))
        return known_elsewhere

    def release(self, blocks: Sequence[int]) -> None:
        self._pool.release(blocks)
        self._clock += 1
        for block in blocks:
            node = self._by_block.get(block)
            if node is not None and self._pool.references(block) == 1:
                self._evictable += 1
                node.last_used = self._clock
                self._push_if_leaf(node)

    def share(self, blocks: Sequence[int]) -> None:
        self._evictable -= sum(block in self._by_block and self._pool.references(block) == 1 for block in blocks)
        self._pool.share(blocks)

    def evict(self, count: int) -> int:
        freed = 0
        while freed < count and self._heap:
            last_used, _, name = heapq.heappop(self._heap)
            node = self._nodes.get(name)
            if node is None or node.children or self._pool.references(node.block) != 1:
                continue
            if node.last_used != last_used:
                self._push_if_leaf(node)  # it was used since: its turn comes later
                continue
            self._remove(node)
            freed += 1
        self._evicted += freed
        return freed

    def count(self, *, hit_tokens: int, missed_tokens: int, recomputed_tokens: int) -> None:
        self._queries += 1
        self._hit_tokens += hit_tokens
        self._missed_tokens += missed_tokens
        self._recomputed_tokens += recomputed_tokens

    def statistics(self) -> PrefixCacheStatistics:
        return PrefixCacheStatistics(
            cached_blocks=len(self._nodes),
            evictable_blocks=self._evictable,
            queries_total=self._queries,
            hit_tokens_total=self._hit_tokens,
            missed_tokens_total=self._missed_tokens,
            evicted_blocks_total=self._evicted,
            snapshots=len(self._with_snapshot),
            snapshot_hits_total=self._snapshot_hits,
            snapshots_taken_total=self._snapshots_taken,
            snapshots_evicted_total=self._snapshots_evicted,
            recomputed_tokens_total=self._recomputed_tokens,
        )

    def reserve_snapshot(self) -> int | None:
        if self._snapshots is None or self._snapshots.places == 0:
            return None
        if self._free_places:
            place = self._free_places.pop()
        else:
            if not self._with_snapshot:
                return None  # every place is being written just now
            # Few enough that a scan is cheap. A snapshot saves the tokens since the one before it on its path.
            place = min(self._with_snapshot, key=lambda place: self._worth(self._with_snapshot[place]))
            self._with_snapshot.pop(place).snapshot = None
            self._snapshots_evicted += 1
        self._reserved.add(place)
        return place

    def keep_snapshot(self, name: bytes, place: int) -> None:
        self._reserved.remove(place)
        node = self._nodes.get(name)
        if node is None or node.snapshot is not None:
            self._free_places.append(place)
            return
        node.snapshot = place
        self._with_snapshot[place] = node
        self._snapshots_taken += 1

    def drop_snapshot(self, place: int) -> None:
        self._reserved.remove(place)
        self._free_places.append(place)

    def held_blocks(self) -> Sequence[int]:
        return [node.block for node in self._nodes.values()]

    def check(self) -> None:
        assert len(self._nodes) == len(self._by_block) == sum(1 for _ in self._walk()), (
            "the tree and its indexes differ"
        )
        for node in self._nodes.values():
            assert self._nodes[node.name] is node and self._by_block[node.block] is node
            assert len(node.tokens) == self._block_size
            siblings = self._tops if node.parent is None else node.parent.children
            assert siblings[node.name] is node, "a node is not below its parent"
            held = self._pool.references(node.block) > 1
            assert not held or node.parent is None or self._pool.references(node.parent.block) > 1, "a path is not held"
        evictable = sum(self._pool.references(node.block) == 1 for node in self._nodes.values())
        assert evictable == self._evictable, f"{evictable} blocks are evictable, {self._evictable} counted"
        places = [*self._free_places, *self._reserved, *self._with_snapshot]
        assert sorted(places) == list(range(self._snapshots.places if self._snapshots else 0)), "a snapshot is lost"
        for place, node in self._with_snapshot.items():
            assert node.snapshot == place and self._nodes.get(node.name) is node, "a snapshot outlives its block"
        assert sum(node.snapshot is not None for node in self._nodes.values()) == len(self._with_snapshot)
        queued = {name for _, _, name in self._heap}
        for node in self._nodes.values():
            leaf = not node.children and self._pool.references(node.block) == 1
            assert not leaf or node.name in queued, "an evictable block is not in the heap"

    def describe(self, limit: int = 1000) -> Iterator[tuple[int, int, int, int]]:
        """(depth, block, references, last use) of the first ``limit`` nodes, parents before children."""
        for number, (depth, node) in enumerate(self._walk()):
            if number == limit:
                return
            yield depth, node.block, self._pool.references(node.block), node.last_used

    def _at_snapshot(self, last: _Node | None, blocks: list[int]) -> PrefixMatch:
        """The match cut back to the deepest block after which the states are known."""
        assert self._snapshots is not None
        known = depth = len(blocks)
        node = last
        while node is not None and (node.snapshot is None or depth * self._block_size < self._snapshots.min_tokens):
            node, depth = node.parent, depth - 1
        if node is None:
            return PrefixMatch(known_blocks=known)
        self._snapshot_hits += 1
        return PrefixMatch(tuple(blocks[:depth]), snapshot=node.snapshot, known_blocks=known)

    def _worth(self, node: _Node) -> tuple[int, int]:
        """When it was last used, and the tokens it saves: what is evicted first is old and saves little."""
        saved, above = 1, node.parent
        while above is not None and above.snapshot is None:
            saved, above = saved + 1, above.parent
        return node.last_used, saved

    def _partial(self, last: _Node | None, rest: Sequence[int]) -> tuple[_Node | None, int]:
        """The child that shares most tokens with ``rest``, the tokens after the whole blocks."""
        if last is None:
            return None, 0  # nodes without a parent belong to all kinds of roots
        best, best_length = None, 0
        for number, node in enumerate(reversed(last.children.values())):
            if number == MAX_SIBLINGS_COMPARED:
                break
            length = 0
            for ours, theirs in zip(rest, node.tokens, strict=False):
                if ours != theirs:
                    break
                length += 1
            if length > best_length:
                best, best_length = node, length
        if best is not None:
            best.last_used = self._clock
        return best, best_length

    def _push_if_leaf(self, node: _Node) -> None:
        if not node.children:
            heapq.heappush(self._heap, (node.last_used, node.block, node.name))

    def _remove(self, node: _Node) -> None:
        del self._nodes[node.name]
        del self._by_block[node.block]
        if node.snapshot is not None:
            del self._with_snapshot[node.snapshot]
            self._free_places.append(node.snapshot)
            self._snapshots_evicted += 1
        parent = node.parent
        del (self._tops if parent is None else parent.children)[node.name]
        self._evictable -= 1
        self._pool.release((node.block,))
        if parent is not None and self._pool.references(parent.block) == 1:
            self._push_if_leaf(parent)

    def _walk(self) -> Iterator[tuple[int, _Node]]:
        stack = [(0, node) for node in self._tops.values()]
        while stack:
            depth, node = stack.pop()
            yield depth, node
            stack.extend((depth + 1, child) for child in node.children.values())
