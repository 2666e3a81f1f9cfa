"""The scheduler on its own: decisions only, results made up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from metrale_async.cache import BlockPool, NoPrefixCaching
from metrale_async.engine.scheduler import Emission, Scheduler, SchedulerLimits
from metrale_async.engine.sequence import Sequence, SequenceStatus
from metrale_async.execution import ChunkResult, SamplerSpec, StepPlan, StepResult

BLOCK_SIZE = 4
END = 99
NEUTRAL = SamplerSpec(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    logit_bias={},
    seed=0,
    choice=0,
    logprobs=None,
    prompt_logprobs=None,
    min_tokens=0,
    suppressed_token_ids=(),
)


def make_sequence(sequence_id: int, prompt_tokens: int, max_new_tokens: int, min_tokens: int = 0) -> Sequence:
    return Sequence(
        sequence_id=sequence_id,
        prompt_token_ids=tuple(range(prompt_tokens)),
        max_new_tokens=max_new_tokens,
        sampler=NEUTRAL,
        end_token_ids=frozenset({END}),
        min_tokens=min_tokens,
    )


def make_scheduler(num_blocks: int, max_batch_size: int = 4) -> Scheduler:
    pool = BlockPool(num_blocks)
    limits = SchedulerLimits(block_size=BLOCK_SIZE, max_batch_size=max_batch_size)
    return Scheduler(pool, NoPrefixCaching(pool), limits)


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[Emission]:
    results = tuple(ChunkResult(token_id=token if chunk.samples else None) for chunk in plan.chunks)
    return scheduler.commit(plan, StepResult(results))


def test_a_prompt_is_cut_by_the_budget_and_sampled_with_its_last_chunk_only() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_sequence(0, prompt_tokens=10, max_new_tokens=2))
    rows = []
    while (plan := scheduler.plan(0.0, max_prefill_tokens=4)) is not None and len(rows) < 5:
        rows.append([(chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks])
        commit(scheduler, plan)
    assert rows == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)], [(10, 1, True)]]


def test_decode_rows_ride_along_with_the_prefill_of_others() -> None:
    scheduler = make_scheduler(num_blocks=16)
    first = make_sequence(0, 4, 8)
    scheduler.add(first)
    commit(scheduler, scheduler.plan(0.0, 64))  # type: ignore[arg-type]
    scheduler.add(make_sequence(1, 12, 8))
    plan = scheduler.plan(0.0, 8)
    assert plan is not None
    assert [(chunk.sequence_id, chunk.start, chunk.count) for chunk in plan.chunks] == [(0, 4, 1), (1, 0, 8)]
    assert (plan.decode_tokens, plan.prefill_tokens) == (1, 8)


def test_the_next_step_is_planned_before_the_last_token_is_known() -> None:
    scheduler = make_scheduler(num_blocks=8)
    sequence = make_sequence(0, 3, 3)
    scheduler.add(sequence)
    plans = [scheduler.plan(0.0, 64) for _ in range(4)]
    # Three tokens are wanted: the prompt step samples one, two decode steps the others, a fourth step is not needed.
    assert plans[3] is None
    assert [plan.chunks[0].start for plan in plans[:3] if plan] == [0, 3, 4]
    for plan in plans[:3]:
        commit(scheduler, plan)  # type: ignore[arg-type]
    assert sequence.status is SequenceStatus.FINISHED
    assert scheduler.pool.num_free == 8


def test_a_row_planned_for_a_sequence_that_just_ended_is_dropped() -> None:
    scheduler = make_scheduler(num_blocks=8)
    sequence = make_sequence(0, 3, 10)
    scheduler.add(sequence)
    first, second = scheduler.plan(0.0, 64), scheduler.plan(0.0, 64)
    assert first is not None
    assert second is not None
    [emission] = commit(scheduler, first, token=END)
    assert emission.ended
    assert emission.end_token_id == END
    assert scheduler.pool.num_free == 8
    assert commit(scheduler, second) == []
    assert sequence.output_token_ids == [END]


def test_end_tokens_do_not_end_before_min_tokens() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_sequence(0, 3, 10, min_tokens=2))
    ended = []
    for _ in range(2):
        plan = scheduler.plan(0.0, 64)
        assert plan is not None
        ended.append(commit(scheduler, plan, token=END)[0].ended)
    assert ended == [False, True]


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(make_sequence(0, 16, 8))
    commit(scheduler, scheduler.plan(0.0, 64))  # type: ignore[arg-type]
    scheduler.add(make_sequence(1, 20, 4))
    scheduler.add(make_sequence(2, 1, 1))
    plan = scheduler.plan(0.0, 64)
    assert plan is not None
    assert [chunk.sequence_id for chunk in plan.chunks] == [0]
    assert scheduler.num_waiting == 2


def test_the_youngest_is_preempted_and_computed_again_from_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=8)
    old, young = make_sequence(0, 8, 16), make_sequence(1, 8, 16)
    scheduler.add(old)
    scheduler.add(young)
    restarted = None
    for _ in range(60):
        plan = scheduler.plan(0.0, 64)
        if plan is None:
            break
        for start in plan.starts:
            if start.sequence_id == 1 and young.preemptions:
                restarted = start
        commit(scheduler, plan)
        scheduler.check()
    assert young.preemptions >= 1
    assert old.preemptions == 0
    assert restarted is not None
    assert len(restarted.token_ids) > 8
    assert restarted.prompt_length == 8
    assert (len(old.output_token_ids), len(young.output_token_ids)) == (16, 16)


def test_a_failed_chunk_ends_its_own_sequence_only() -> None:
    scheduler = make_scheduler(num_blocks=8)
    first, second = make_sequence(0, 3, 4), make_sequence(1, 3, 4)
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(0.0, 64)
    assert plan is not None
    fault = RuntimeError("device")
    emissions = scheduler.commit(plan, StepResult((ChunkResult(error=fault), ChunkResult(token_id=5))))
    assert [(e.sequence.sequence_id, e.result.error, e.ended) for e in emissions] == [
        (0, fault, True),
        (1, None, False),
    ]
    assert first.status is SequenceStatus.FINISHED
    assert second.output_token_ids == [5]
    scheduler.check()


@dataclass
class Arrival:
    prompt_tokens: int
    max_new_tokens: int
    before_step: int
    leaves_at_step: int | None
    ends_after: int | None


@dataclass
class Run:
    finished: list[int] = field(default_factory=list)


arrivals = st.builds(
    Arrival,
    prompt_tokens=st.integers(1, 20),
    max_new_tokens=st.integers(1, 12),
    before_step=st.integers(0, 20),
    leaves_at_step=st.none() | st.integers(0, 40),
    ends_after=st.none() | st.integers(1, 12),
)


@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=12),
    num_blocks=st.integers(8, 20),
    max_batch_size=st.integers(1, 5),
    budget=st.integers(1, 24),
    depth=st.integers(1, 3),
)
def test_every_sequence_ends_once_with_all_its_tokens_and_nothing_leaks(
    arrivals: list[Arrival], num_blocks: int, max_batch_size: int, budget: int, depth: int
) -> None:
    scheduler = make_scheduler(num_blocks, max_batch_size)
    to_come = deque(sorted(enumerate(arrivals), key=lambda item: item[1].before_step))
    sequences: dict[int, tuple[Sequence, Arrival]] = {}
    in_flight: deque[StepPlan] = deque()
    ended: list[int] = []
    for step in range(3000):
        while to_come and to_come[0][1].before_step <= step:
            _, arrival = to_come.popleft()
            sequence = make_sequence(len(sequences), arrival.prompt_tokens, arrival.max_new_tokens)
            sequences[sequence.sequence_id] = (sequence, arrival)
            scheduler.add(sequence)
        for sequence, arrival in sequences.values():
            if arrival.leaves_at_step == step:
                scheduler.finish(sequence)
        plan = scheduler.plan(float(step), budget) if len(in_flight) < depth else None
        if plan is not None:
            assert plan.prefill_tokens <= budget
            assert len({chunk.slot for chunk in plan.chunks}) == len(plan.chunks) <= max_batch_size
            in_flight.append(plan)
        elif in_flight:
            oldest = in_flight.popleft()
            results = []
            for chunk in oldest.chunks:
                sequence, arrival = sequences[chunk.sequence_id]
                ends = arrival.ends_after is not None and len(sequence.output_token_ids) + 1 >= arrival.ends_after
                results.append(ChunkResult(token_id=(END if ends else 1) if chunk.samples else None))
            for emission in scheduler.commit(oldest, StepResult(tuple(results))):
                if emission.ended:
                    ended.append(emission.sequence.sequence_id)
        elif not to_come:
            break
        scheduler.check()
    assert scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.pool.num_free == num_blocks
    assert len(ended) == len(set(ended))
    for sequence, arrival in sequences.values():
        assert sequence.status is SequenceStatus.FINISHED
        expected = min(arrival.max_new_tokens, arrival.ends_after or arrival.max_new_tokens)
        generated = len(sequence.output_token_ids)
        if arrival.leaves_at_step is None:
            assert generated == expected
        else:
            assert generated <= expected


def test_other_choices_share_the_prompts_full_blocks_and_compute_its_last_token() -> None:
    scheduler = make_scheduler(num_blocks=16)
    first, second = make_sequence(0, 9, 4), make_sequence(1, 9, 4)
    second.leader = first
    scheduler.add(first)
    scheduler.add(second)
    plan = scheduler.plan(0.0, 64)
    assert plan is not None
    assert [(chunk.start, chunk.count) for chunk in plan.chunks] == [(0, 9), (8, 1)]
    assert plan.starts[1].blocks == tuple(first.blocks[:2])
    assert plan.prefill_tokens == 10
    commit(scheduler, plan)
    scheduler.finish(first)
    scheduler.check()
    assert [scheduler.pool.references(block) for block in second.blocks] == [1, 1, 1]
    scheduler.finish(second)
    assert scheduler.pool.num_free == 16
