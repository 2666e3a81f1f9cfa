from __future__ import annotations

import dataclasses
from dataclasses import asdict

import pytest

from metrale_async.cache import BlockPool, RadixPrefixCache
from metrale_async.engine.scheduler import Scheduler
from metrale_async.engine.sequence import Sequence
from metrale_async.execution import Chunk
from tests.simulation.world import run_seed

SEEDS_PER_TEST = 100


@pytest.mark.parametrize("first", range(0, 800, SEEDS_PER_TEST))
def test_answers_do_not_depend_on_load_and_nothing_leaks(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        run_seed(seed)


def test_the_simulation_meets_every_kind_of_end() -> None:
    totals: dict[str, int] = {}
    for seed in range(200):
        for name, count in asdict(run_seed(seed)).items():
            totals[name] = totals.get(name, 0) + count
    assert all(count > 20 for count in totals.values()), totals


def _finds(seeds: int = 200) -> bool:
    for seed in range(seeds):
        try:
            run_seed(seed)
        except BaseException:
            return True
    return False


def test_it_finds_a_missed_release(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: release(self, list(blocks)[1:]))
    assert _finds()


def test_it_finds_a_block_given_to_two_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: BlockPool, count: int) -> list[int]:
        taken = original(self, count)
        if taken and self.num_free:
            self._free[-1] = taken[0]
        return taken

    original = BlockPool.allocate
    monkeypatch.setattr(BlockPool, "allocate", allocate)
    assert _finds()


def test_it_finds_a_token_lost_by_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    def preempt(self: Scheduler, sequence: Sequence) -> None:
        original(self, sequence)
        del sequence.output_token_ids[-1:]

    original = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", preempt)
    assert _finds()


def test_it_finds_an_end_token_that_is_not_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Scheduler, sequence: Sequence) -> None:
        sequence.end_token_ids = frozenset()
        original(self, sequence)

    original = Scheduler.add
    monkeypatch.setattr(Scheduler, "add", add)
    assert _finds()


def test_it_finds_a_wrong_block_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that forgets the tokens before a block, so that equal blocks of different prefixes pass for each other."""

    def unchained(root: bytes, token_ids: list[int], block_size: int, known: list[bytes]) -> list[bytes]:
        count = len(token_ids) // block_size
        blocks = [tuple(token_ids[i * block_size : (i + 1) * block_size]) for i in range(count)]
        return [repr((i, block)).encode() for i, block in enumerate(blocks)]

    monkeypatch.setattr("metrale_async.engine.scheduler.block_hashes", unchained)
    assert _finds()


def test_it_finds_a_live_block_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    def references(self: BlockPool, block: int) -> int:
        return min(1, original(self, block))

    original = BlockPool.references
    monkeypatch.setattr(BlockPool, "references", references)
    assert _finds()


def test_it_finds_rows_published_before_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: Scheduler, sequence: Sequence, chunk: Chunk) -> None:
        original(self, sequence, dataclasses.replace(chunk, count=sequence.num_tokens - chunk.start))

    original = Scheduler._publish
    monkeypatch.setattr(Scheduler, "_publish", publish)
    assert _finds()


def test_it_finds_a_snapshot_of_another_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that is said to lie one block before the place where it was taken."""

    def keep(self: RadixPrefixCache, name: bytes, place: int) -> None:
        parent = self._nodes[name].parent
        original(self, name if parent is None else parent.name, place)

    original = RadixPrefixCache.keep_snapshot
    monkeypatch.setattr(RadixPrefixCache, "keep_snapshot", keep)
    assert _finds()


def test_it_finds_a_snapshot_overwritten_while_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evicting a snapshot without telling the node that has it."""

    def reserve(self: RadixPrefixCache) -> int | None:
        if not self._free_places and self._with_snapshot:
            place = next(iter(self._with_snapshot))
            self._reserved.add(place)
            return place
        return original(self)

    original = RadixPrefixCache.reserve_snapshot
    monkeypatch.setattr(RadixPrefixCache, "reserve_snapshot", reserve)
    assert _finds()
