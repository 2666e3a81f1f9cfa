"""The engine on virtual time, driven by a seed: arrivals, cancellations, deadlines, device faults, a pool that is too
small.

Every answer is compared with what the scripted model gives the same request alone, and after every step all references
must add up. A failing seed prints the command that runs it again.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace

from metrale_async.cache import SnapshotLimits
from metrale_async.engine import AsyncEngine, EngineArgs, RequestRecord, SamplingParams, StepRecord
from metrale_async.errors import QueueFullError, StepError
from metrale_async.execution import Chunk, SamplerSpec, StepPlan
from metrale_async.execution.scripted import chain, scripted_token
from tests.support.scripted_engine import END_TOKEN_ID, VOCAB_SIZE, scripted_engine
from tests.support.virtual_time import run_on_virtual_time


class DeviceFaultError(RuntimeError):
    """What the simulated device raises."""


@dataclass(frozen=True)
class PlannedRequest:
    arrives_at_s: float
    prompt: tuple[int, ...]
    params: SamplingParams
    leaves_after_s: float | None
    leaves_after_deltas: int | None
    faulty: bool


@dataclass
class Summary:
    """What a run came to, for the tests that ask whether the simulation exercises anything at all."""

    finished: int = 0
    left: int = 0
    timed_out: int = 0
    faulted: int = 0
    refused: int = 0
    preemptions: int = 0
    steps: int = 0
    cache_hits: int = 0
    evictions: int = 0
    snapshot_hits: int = 0
    snapshots_evicted: int = 0


class Watcher:
    """Checks the engine after every step and that each request ends exactly once."""

    def __init__(self) -> None:
        self.engine: AsyncEngine | None = None
        self.ended: dict[str, RequestRecord] = {}
        self.steps = 0

    def step_finished(self, record: StepRecord) -> None:
        assert self.engine is not None
        self.engine.check()
        self.steps += 1
        assert record.duration_s >= 0

    def request_finished(self, record: RequestRecord) -> None:
        assert record.request_id not in self.ended, "a request ended twice"
        self.ended[record.request_id] = record


def expected_tokens(prompt: tuple[int, ...], params: SamplingParams, choice: int, count: int) -> list[int]:
    """The scripted model's answer, computed without an engine: at most ``count`` tokens, up to an end token."""
    sampler = SamplerSpec(
        temperature=params.temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        seed=params.seed or 0,
        choice=choice,
        logprobs=None,
        prompt_logprobs=None,
        min_tokens=0,
        suppressed_token_ids=(),
    )
    digest = 0
    for token in prompt:
        digest = chain(digest, token)
    tokens: list[int] = []
    while len(tokens) < count and (not tokens or tokens[-1] != END_TOKEN_ID or params.ignore_eos):
        tokens.append(scripted_token(digest, VOCAB_SIZE, sampler))
        digest = chain(digest, tokens[-1])
    return tokens


def plan_requests(rng: random.Random, capacity_tokens: int) -> list[PlannedRequest]:
    requests = []
    # With few different tokens, equal blocks come up behind different prefixes.
    alphabet = rng.choice((2, 256))
    shared = tuple(rng.randrange(alphabet) for _ in range(64))
    for _ in range(rng.randint(1, 14)):
        # Sharing a long beginning is what prefix caches and their mistakes feed on.
        length = rng.randint(1, max(1, capacity_tokens // rng.choice((2, 3, 6))))
        own = tuple(rng.randrange(alphabet) for _ in range(length))
        prompt = (shared + own)[:length] if rng.random() < 0.4 else own
        n = rng.choice((1, 1, 1, 2, 4))
        requests.append(
            PlannedRequest(
                arrives_at_s=rng.choice((0.0, rng.random() * 0.2)),
                prompt=prompt,
                params=SamplingParams(
                    temperature=rng.choice((0.0, 1.0)),
                    seed=rng.randrange(2**32),
                    n=n,
                    max_tokens=rng.randint(1, max(1, min(40, capacity_tokens - length))),
                    ignore_eos=rng.random() < 0.5,
                ),
                leaves_after_s=rng.random() * 0.2 if rng.random() < 0.2 else None,
                leaves_after_deltas=rng.randint(1, 12) if rng.random() < 0.15 else None,
                faulty=rng.random() < 0.05,
            )
        )
    return requests


async def simulate(seed: int) -> Summary:
    """One run; raises AssertionError with everything needed to run it again."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16))
    num_blocks = rng.randint(3, 40)
    capacity_tokens = num_blocks * block_size
    requests = plan_requests(rng, capacity_tokens)
    faulty_prompts = {request.prompt for request in requests if request.faulty}
    # Two requests may have one prompt by chance; a fault that is meant for one then meets both.
    requests = [replace(request, faulty=request.prompt in faulty_prompts) for request in requests]
    watcher = Watcher()
    summary = Summary()
    starts: dict[int, tuple[int, ...]] = {}
    base_s, per_token_s = rng.choice(((0.001, 0.0), (0.002, 0.0005), (0.02, 0.001)))

    def step_s(plan: StepPlan) -> float:
        for start in plan.starts:
            starts[start.sequence_id] = start.token_ids[: start.prompt_length]
        return rng.random() * base_s + per_token_s * (plan.prefill_tokens + plan.decode_tokens)

    def fault(plan: StepPlan, chunk: Chunk) -> Exception | None:
        hit = starts[chunk.sequence_id] in faulty_prompts and rng.random() < 0.2
        return DeviceFaultError("injected") if hit else None

    args = EngineArgs(
        max_prefill_tokens=rng.choice((None, 1, 5, 16, 64)),
        max_num_seqs=rng.choice((3, 16, 1024)),
        request_timeout=rng.choice((0.05, 300.0)),
        ssm_checkpoint_interval=rng.choice((1, 2, 5)),
        marconi_min_tokens=rng.choice((0, 0, 7)),
    )
    engine = scripted_engine(
        args=args,
        observer=watcher,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_size=rng.randint(1, 6),
        max_seq_len=4096,
        prefix_caching=rng.random() < 0.6,
        has_state=rng.random() < 0.5,
        snapshots=SnapshotLimits(places=rng.choice((0, 1, 2, 8)), min_tokens=args.marconi_min_tokens),
        step_s=step_s,
        fault=fault,
    )
    watcher.engine = engine
    async with engine:
        async with asyncio.TaskGroup() as clients:
            for request in requests:
                clients.create_task(_client(engine, request, summary))
        statistics = engine.statistics()
        # What is still used lies in the prefix cache, and nobody holds it.
        assert statistics.kv_blocks.used == statistics.prefix_cache.cached_blocks, "blocks leaked"
        assert statistics.prefix_cache.evictable_blocks == statistics.prefix_cache.cached_blocks
        assert statistics.requests_active == statistics.sequences_running == statistics.sequences_waiting == 0
        assert len(watcher.ended) == statistics.requests_total
        summary.preemptions = statistics.preemptions_total
        summary.steps = watcher.steps
        summary.cache_hits = statistics.prefix_cache.hit_tokens_total
        summary.snapshot_hits = statistics.prefix_cache.snapshot_hits_total
        summary.snapshots_evicted = statistics.prefix_cache.snapshots_evicted_total
        summary.evictions = statistics.prefix_cache.evicted_blocks_total
    return summary


async def _client(engine: AsyncEngine, request: PlannedRequest, summary: Summary) -> None:
    await asyncio.sleep(request.arrives_at_s)
    try:
        stream = engine.submit(request.prompt, request.params)
    except QueueFullError:
        summary.refused += 1
        return
    tokens: dict[int, list[int]] = {index: [] for index in range(request.params.n)}
    reasons: dict[int, str] = {}
    deltas = 0
    limit_s = request.leaves_after_s
    try:
        async with asyncio.timeout(limit_s), stream:
            async for delta in stream:
                assert delta.index not in reasons, "a choice went on after its end"
                tokens[delta.index].extend(delta.token_ids)
                deltas += 1
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
                if deltas == request.leaves_after_deltas:
                    break
    except TimeoutError:
        summary.left += 1
    except StepError:
        assert request.faulty, "a neighbour's fault"
        summary.faulted += 1
    else:
        if deltas == request.leaves_after_deltas:
            summary.left += 1
        else:
            assert len(reasons) == request.params.n
            summary.finished += 1
    for index, got in tokens.items():
        limit = request.params.max_tokens
        assert limit is not None
        whole = expected_tokens(request.prompt, request.params, index, limit)
        assert got == whole[: len(got)], f"choice {index} differs from the answer given alone"
        reason = reasons.get(index)
        if reason == "timeout":
            summary.timed_out += 1
        elif reason is not None:
            assert got == whole, f"choice {index} ended early with {reason}"
            ends = bool(whole) and whole[-1] == END_TOKEN_ID and not request.params.ignore_eos
            assert reason == ("stop" if ends else "length")


def run_seed(seed: int) -> Summary:
    try:
        return run_on_virtual_time(simulate(seed))
    except BaseException as error:
        error.add_note(f"run it again: python -m tests.simulation {seed}")
        raise
