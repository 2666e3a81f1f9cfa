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

from metrale_async.cache import BlockPool
from metrale_async.engine.sequence import Sequence, SequenceStatus
from metrale_async.execution.plan import Chunk, ChunkResult, SequenceStart, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What a step may hold."""

    block_size: int
    max_batch_size: int
    """Sequences that hold a slot at a time."""


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

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._free_slots = list(range(limits.max_batch_size - 1, -1, -1))
        self._waiting: deque[Sequence] = deque()
        """By arrival."""
        self._running: list[Sequence] = []
        """By arrival: the last one is preempted first."""
        self._in_flight: deque[tuple[StepPlan, list[Sequence]]] = deque()
        self._next_step = 0
        self.preemptions_total = 0

    # What may be asked at any time

    @property
    def pool(self) -> BlockPool:
        return self._pool

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
        planned: list[Sequence] = []
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
            if not self._make_room(sequence, rows):
                break
            chunks.append(self._take_rows(sequence, rows))
            planned.append(sequence)
            if is_decode:
                decode_tokens += 1
            else:
                budget -= rows

        spare = self._spare_blocks() if self._waiting else 0
        while self._waiting and self._free_slots and budget > 0:
            sequence = self._waiting[0]
            shared = self._shared_prompt_blocks(sequence)
            needed = self._blocks_for(sequence.planned_tokens + 1) - len(shared)
            # A preempted sequence whose last token is still being computed cannot start over yet.
            if sequence.samples_in_flight or (self._running and needed + 1 > spare) or needed > self._pool.num_free:
                break
            starts.append(self._start(self._waiting.popleft(), shared, now_s))
            spare -= needed + 1
            rows = min(sequence.uncomputed_tokens, budget)
            chunks.append(self._take_rows(sequence, rows))
            planned.append(sequence)
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
        for chunk, sequence, chunk_result in zip(plan.chunks, sequences, result.chunks, strict=True):
            if chunk.samples:
                sequence.samples_in_flight -= 1
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
        self._pool.check(block for sequence in self._sequences() for block in sequence.blocks)
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
        """Free blocks for ``rows`` more tokens of a running sequence, if need be by preempting younger ones or
        itself."""
        needed = self._blocks_for(sequence.computed_tokens + rows) - len(sequence.blocks)
        while needed > self._pool.num_free:
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
        self._pool.release(sequence.blocks)
        sequence.blocks.clear()
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _take_rows(self, sequence: Sequence, rows: int) -> Chunk:
        missing = self._blocks_for(sequence.computed_tokens + rows) - len(sequence.blocks)
        new_blocks = self._pool.allocate(max(0, missing))
        sequence.blocks.extend(new_blocks)
        start = sequence.computed_tokens
        sequence.computed_tokens = start + rows
        samples = sequence.computed_tokens == sequence.planned_tokens
        if samples:
            sequence.samples_in_flight += 1
        return Chunk(sequence.slot, sequence.sequence_id, start, rows, tuple(new_blocks), samples)

    def _spare_blocks(self) -> int:
        """Free blocks left once every running sequence has what its known tokens need, and one block to grow into.

        Admission goes by this number: a sequence admitted into less would be preempted when the others' next block is
        due.
        """
        promised = sum(
            max(0, self._blocks_for(sequence.planned_tokens + 1) - len(sequence.blocks)) + 1
            for sequence in self._running
        )
        return self._pool.num_free - promised

    def _shared_prompt_blocks(self, sequence: Sequence) -> list[int]:
        """Full blocks of the prompt that the request's first choice has computed (or will have, in this step's layers,
        before its other choices read them). The prompt's last token is left to compute: its logits are needed."""
        leader = sequence.leader
        if leader is None or leader.status is not SequenceStatus.RUNNING:
            return []
        computed_blocks = leader.computed_tokens // self._limits.block_size
        return leader.blocks[: min(computed_blocks, (len(sequence.prompt_token_ids) - 1) // self._limits.block_size)]

    def _start(self, sequence: Sequence, shared: list[int], now_s: float) -> SequenceStart:
        sequence.status = SequenceStatus.RUNNING
        sequence.slot = self._free_slots.pop()
        self._pool.share(shared)
        sequence.blocks.extend(shared)
        sequence.computed_tokens = len(shared) * self._limits.block_size
        if sequence.first_planned_at_s is None:
            sequence.first_planned_at_s = now_s
        self._running.append(sequence)
        return SequenceStart(
            slot=sequence.slot,
            sequence_id=sequence.sequence_id,
            token_ids=(*sequence.prompt_token_ids, *sequence.output_token_ids),
            prompt_length=len(sequence.prompt_token_ids),
            blocks=tuple(shared),
            sampler=sequence.sampler,
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
