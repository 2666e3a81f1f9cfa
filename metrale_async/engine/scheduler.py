"""The scheduler: decides each step, pure and synchronous. No I/O, no torch, no clock of its own.

One step holds a decode row for every running sequence that has a token to feed, and prompt rows up to the prefill
budget: first for running sequences whose prompt is not finished, then for waiting ones, strictly first come, first
served. When blocks run out the youngest running sequence is preempted: its blocks are freed at once, it returns to the
queue at the place of its arrival, and it is computed again from its tokens later. The oldest sequence can take every
block there is and a request is only accepted if it fits alone, so the oldest always finishes and every sequence
becomes the oldest.

Plans are made ahead: while step n runs, plan n + 1 counts on the tokens that step n will sample without knowing them
(``Sequence.samples_in_flight``). If such a token turns out to end its sequence, the row already planned for the next
step is computed for nothing and its result is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from metrale_async.cache import BlockPool, PrefixCache, PrefixMatch, block_hashes
from metrale_async.engine.sequence import Sequence, SequenceStatus
from metrale_async.execution.plan import Chunk, ChunkResult, SequenceStart, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold."""

    block_size: int
    max_batch_size: int
    """Sequences that hold a slot at a time."""
    kv_is_whole_state: bool = True
    """A sequence can start anywhere its KV rows reach; not so if its layers keep recurrent states."""
    snapshot_interval_blocks: int = 256
    """Recurrent states are kept that often along a prompt, for the prefix cache to start from."""
    snapshot_min_tokens: int = 0
    """Not at a smaller depth: such a snapshot would not be used."""


@dataclass(frozen=True, slots=True)
class Emission:
    """What one committed step gave one sequence."""

    sequence: Sequence
    chunk: Chunk
    result: ChunkResult
    ended: bool
    """The sequence is finished: by this token, by its length, or by ``result.error``."""
    end_token_id: int | None = None
    """The token that ended it, if one did."""


class Scheduler:
    """Owns every sequence between :meth:`add` and its end, the block pool, and the slots."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._cache = cache
        self._limits = limits
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        """By arrival."""
        self._running: list[Sequence] = []
        """By arrival: the last one is preempted first."""
        self._in_flight: deque[tuple[StepPlan, list[tuple[Sequence, int]]]] = deque()
        """Plans not committed yet, and for each chunk its sequence and how often that had been preempted."""
        self._next_step = 0
        self.preemptions_total = 0

    # What may be asked at any time

    @property
    def pool(self) -> BlockPool:
        return self._pool

    @property
    def cache(self) -> PrefixCache:
        return self._cache

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet committed."""
        return len(self._in_flight)

    @property
    def has_running_decode(self) -> bool:
        """A sequence is past its prompt, so somebody waits for the next token of a stream."""
        return any(sequence.output_token_ids or sequence.samples_in_flight for sequence in self._running)

    def max_tokens_of_one_sequence(self) -> int:
        """The longest sequence the pool can hold alone."""
        return self._pool.num_blocks * self._limits.block_size

    # A sequence's way in and out

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its id must be above all earlier ones'."""
        assert sequence.status is SequenceStatus.WAITING and sequence.num_tokens > 0
        assert len(sequence.prompt_token_ids) + sequence.max_new_tokens <= self.max_tokens_of_one_sequence()
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence now, in whatever state it is, and free all it holds. Doing so twice is harmless."""
        if sequence.status is SequenceStatus.WAITING:
            self._waiting.remove(sequence)
        elif sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._free(sequence)
        sequence.status = SequenceStatus.FINISHED

    # A step

    def plan(self, now_s: float, max_prefill_tokens: int) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. ``max_prefill_tokens`` bounds its prompt rows."""
        starts: list[SequenceStart] = []
        chunks: list[Chunk] = []
        planned: list[tuple[Sequence, int]] = []
        budget = max_prefill_tokens
        decode_tokens = 0

        # self._running may lose sequences from its end while this loop walks it from its start.
        position = 0
        while position < len(self._running):
            sequence = self._running[position]
            position += 1
            rows = sequence.uncomputed_tokens
            if rows == 0:
                continue
            is_decode = sequence.computed_tokens >= len(sequence.prompt_token_ids) and rows == 1
            if not is_decode:
                rows = min(rows, budget)
            elif sequence.wants_no_more_tokens:
                continue
            if rows == 0:
                continue
            rows = self._rows_to_snapshot(sequence, rows)
            if not self._make_room(sequence, rows):
                break
            chunks.append(self._take_rows(sequence, rows))
            planned.append((sequence, sequence.preemptions))
            if is_decode:
                decode_tokens += 1
            else:
                budget -= rows

        promised = self._promised_blocks() if self._waiting else 0
        while self._waiting and self._free_slots and budget > 0:
            sequence = self._waiting[0]
            # A preempted sequence whose last token is still being computed cannot start over yet.
            if sequence.samples_in_flight:
                break
            match = self._match_prefix(sequence)
            # What was found is held from here on, so that making room for the rest cannot take it away.
            self._cache.share(match.blocks)
            needed = self._blocks_for(sequence.planned_tokens + 1) - len(match.blocks)
            free = self._pool.num_free + self._cache.num_evictable
            if needed > free or (self._running and promised + needed + 1 > free):
                self._cache.release(match.blocks)
                break
            promised += needed + 1
            starts.append(self._start(self._waiting.popleft(), match, now_s))
            rows = self._rows_to_snapshot(sequence, min(sequence.uncomputed_tokens, budget))
            has_room = self._make_room(sequence, rows)
            assert has_room, "an admitted sequence fits"
            chunks.append(self._take_rows(sequence, rows))
            planned.append((sequence, sequence.preemptions))
            budget -= rows

        if not chunks:
            return None
        plan = StepPlan(
            step=self._next_step,
            starts=tuple(starts),
            chunks=tuple(chunks),
            prefill_tokens=max_prefill_tokens - budget,
            decode_tokens=decode_tokens,
        )
        self._next_step += 1
        self._in_flight.append((plan, planned))
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Apply the result of the oldest step in flight; returns what each sequence got, in plan order."""
        expected, sequences = self._in_flight.popleft()
        assert plan is expected and len(result.chunks) == len(plan.chunks), "results must come back in step order"
        emissions: list[Emission] = []
        for chunk, (sequence, preemptions), chunk_result in zip(plan.chunks, sequences, result.chunks, strict=True):
            if chunk.samples:
                sequence.samples_in_flight -= 1
            # Rows of a run that was preempted since are gone, though the token they gave is good.
            is_current = sequence.status is SequenceStatus.RUNNING and preemptions == sequence.preemptions
            if is_current and chunk_result.error is None:
                self._publish(sequence, chunk)
            elif chunk.snapshot is not None:
                self._cache.drop_snapshot(chunk.snapshot)
            if sequence.status is SequenceStatus.FINISHED:
                continue
            if chunk_result.error is not None:
                self.finish(sequence)
                emissions.append(Emission(sequence, chunk, chunk_result, ended=True))
            elif chunk.samples:
                emissions.append(self._append_token(sequence, chunk, chunk_result))
            elif chunk_result.prompt_logprobs:
                emissions.append(Emission(sequence, chunk, chunk_result, ended=False))
        return emissions

    def check(self) -> None:
        """Integrity of all that the scheduler owns. Raises AssertionError when wrong."""
        self._cache.check()
        held = [block for sequence in self._sequences() for block in sequence.blocks]
        self._pool.check([*held, *self._cache.held_blocks()])
        slots = [sequence.slot for sequence in self._running]
        assert sorted(slots + self._free_slots) == list(range(self._limits.max_batch_size)), "slots leaked"
        ids = [sequence.sequence_id for sequence in (*self._running, *self._waiting)]
        assert ids == sorted(set(ids)), "arrival order is broken: all running ones come before all waiting ones"
        for sequence in self._waiting:
            assert sequence.status is SequenceStatus.WAITING and not sequence.blocks and sequence.slot == -1
        for sequence in self._running:
            assert sequence.status is SequenceStatus.RUNNING
            assert sequence.computed_tokens <= len(sequence.blocks) * self._limits.block_size
            assert sequence.computed_tokens <= sequence.planned_tokens

    # Helpers, in the order of use

    def _make_room(self, sequence: Sequence, rows: int) -> bool:
        """Free blocks for ``rows`` more tokens of a running sequence: first cached ones that nobody uses, then those of
        younger sequences or its own, by preemption."""
        needed = self._blocks_for(sequence.computed_tokens + rows) - len(sequence.blocks)
        while needed > self._pool.num_free:
            if self._cache.evict(needed - self._pool.num_free):
                continue
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        assert sequence is self._running.pop()
        self._free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self.preemptions_total += 1
        # Only the youngest running one is ever preempted, so whatever waits came later.
        self._waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._cache.release(sequence.blocks)
        sequence.blocks.clear()
        sequence.table_updates.clear()
        sequence.published_blocks = 0
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _take_rows(self, sequence: Sequence, rows: int) -> Chunk:
        missing = self._blocks_for(sequence.computed_tokens + rows) - len(sequence.blocks)
        new_blocks = self._pool.allocate(max(0, missing))
        sequence.blocks.extend(new_blocks)
        start = sequence.computed_tokens
        sequence.computed_tokens = start + rows
        snapshot = None
        if sequence.computed_tokens in sequence.snapshot_positions:
            snapshot = self._cache.reserve_snapshot()
        samples = sequence.computed_tokens == sequence.planned_tokens
        if samples:
            sequence.samples_in_flight += 1
        table_updates = tuple(sequence.table_updates)
        sequence.table_updates.clear()
        return Chunk(
            sequence.slot, sequence.sequence_id, start, rows, tuple(new_blocks), samples, table_updates, snapshot
        )

    def _promised_blocks(self) -> int:
        """What running sequences will still take: blocks for their known tokens, and one each to grow into.

        Admission leaves that much free: a sequence admitted into less would be preempted when the others' next block
        is due.
        """
        return sum(
            max(0, self._blocks_for(sequence.planned_tokens + 1) - len(sequence.blocks)) + 1
            for sequence in self._running
        )

    def _match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """Rows of a waiting sequence that exist already. Its last token is left to compute: its logits are needed."""
        wanted = (sequence.num_tokens - 1) // self._limits.block_size
        leader = sequence.leader
        shares = self._limits.kv_is_whole_state
        if shares and leader is not None and leader.status is SequenceStatus.RUNNING:
            # The request's first choice has computed them, or will have in this step's layers before others read them.
            computed = leader.computed_tokens // self._limits.block_size
            prompt_blocks = (len(sequence.prompt_token_ids) - 1) // self._limits.block_size
            return PrefixMatch(tuple(leader.blocks[: min(computed, prompt_blocks)]))
        if not (self._cache.is_enabled and sequence.reads_prefix_cache):
            return PrefixMatch()
        token_ids = self._token_ids(sequence)
        self._extend_hashes(sequence, token_ids)
        return self._cache.match(sequence.hashes[:wanted], token_ids[:-1])

    def _start(self, sequence: Sequence, match: PrefixMatch, now_s: float) -> SequenceStart:
        """Give a slot to a sequence that holds a reference to each of ``match.blocks``."""
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self._running.append(sequence)
        sequence.blocks.extend(match.blocks)
        sequence.computed_tokens = len(match.blocks) * self._limits.block_size
        sequence.snapshot_positions = self._snapshot_positions(sequence, match)
        copies: tuple[tuple[int, int], ...] = ()
        if match.partial_block is not None and self._make_room(sequence, 1):
            # The source may just have been evicted to make room. Its rows are there until something is computed, and
            # copies come first in a step.
            [target] = self._pool.allocate(1)
            copies = ((match.partial_block, target),)
            sequence.blocks.append(target)
            sequence.computed_tokens += match.partial_tokens
        self._count_hit(sequence)
        if sequence.first_planned_at_s is None:
            sequence.first_planned_at_s = now_s
        return SequenceStart(
            slot=sequence.slot,
            sequence_id=sequence.sequence_id,
            token_ids=tuple(self._token_ids(sequence)),
            prompt_length=len(sequence.prompt_token_ids),
            blocks=tuple(sequence.blocks),
            copies=copies,
            snapshot=match.snapshot,
            sampler=sequence.sampler,
        )

    def _snapshot_positions(self, sequence: Sequence, match: PrefixMatch) -> list[int]:
        """Where the states of a sequence that starts are worth keeping, in order.

        At the last block boundary before its last token (the same prompt, or a longer one, starts there next time),
        where it leaves what others computed (a branch), and now and then on the way.
        """
        if self._limits.kv_is_whole_state or not (self._cache.is_enabled and sequence.reads_prefix_cache):
            return []
        size = self._limits.block_size
        interval = self._limits.snapshot_interval_blocks * size
        last = (sequence.num_tokens - 1) // size * size
        wanted = {last, match.known_blocks * size, *range(interval, last, interval)}
        lowest = max(sequence.computed_tokens, self._limits.snapshot_min_tokens - 1)
        return sorted(position for position in wanted if lowest < position <= last)

    def _rows_to_snapshot(self, sequence: Sequence, rows: int) -> int:
        """``rows``, or fewer if the states after an earlier one are wanted."""
        end = sequence.computed_tokens + rows
        return min([end, *(p for p in sequence.snapshot_positions if p > sequence.computed_tokens)]) - (
            sequence.computed_tokens
        )

    def _count_hit(self, sequence: Sequence) -> None:
        found = sequence.computed_tokens
        if sequence.preemptions:
            self._cache.count(hit_tokens=0, missed_tokens=0, recomputed_tokens=sequence.num_tokens - found)
            return
        sequence.cached_tokens = found
        self._cache.count(hit_tokens=found, missed_tokens=sequence.num_tokens - found, recomputed_tokens=0)

    def _publish(self, sequence: Sequence, chunk: Chunk) -> None:
        """Tell the cache of full blocks whose rows a committed chunk has completed, and of the states after them."""
        computed = min(chunk.start + chunk.count, sequence.num_tokens)
        full = computed // self._limits.block_size
        if self._cache.is_enabled and full > sequence.published_blocks:
            self._publish_blocks(sequence, full)
        if chunk.snapshot is not None:
            self._cache.keep_snapshot(sequence.hashes[full - 1], chunk.snapshot)

    def _publish_blocks(self, sequence: Sequence, full: int) -> None:
        token_ids = self._token_ids(sequence)
        self._extend_hashes(sequence, token_ids)
        known_elsewhere = self._cache.insert(
            sequence.hashes[:full], token_ids, sequence.blocks, sequence.published_blocks
        )
        for index, block in known_elsewhere:
            self._cache.release((sequence.blocks[index],))
            sequence.blocks[index] = block
        sequence.table_updates += known_elsewhere
        sequence.published_blocks = full

    def _token_ids(self, sequence: Sequence) -> list[int]:
        return [*sequence.prompt_token_ids, *sequence.output_token_ids]

    def _extend_hashes(self, sequence: Sequence, token_ids: list[int]) -> None:
        if len(sequence.hashes) < len(token_ids) // self._limits.block_size:
            sequence.hashes = block_hashes(
                sequence.hash_root, token_ids, self._limits.block_size, known=sequence.hashes
            )

    def _append_token(self, sequence: Sequence, chunk: Chunk, result: ChunkResult) -> Emission:
        assert result.token_id is not None
        sequence.output_token_ids.append(result.token_id)
        generated = len(sequence.output_token_ids)
        ends = generated >= sequence.min_tokens and result.token_id in sequence.end_token_ids
        if ends or generated >= sequence.max_new_tokens:
            self.finish(sequence)
            return Emission(sequence, chunk, result, ended=True, end_token_id=result.token_id if ends else None)
        return Emission(sequence, chunk, result, ended=False)

    def _sequences(self) -> Iterator[Sequence]:
        yield from self._waiting
        yield from self._running
