"""An executor without a model: tokens are a function of the sequence's own history, and the KV memory is real.

Each KV slot holds a digest of its token and all tokens before it. A step reads the digest before a chunk *through the
block table the plans built*, chains the chunk's tokens onto it, and the sampled token is drawn from the last digest. A
wrong block, a block freed too early or two sequences writing to one block therefore change the tokens, as with a
model; with ``verify`` every read of a step is also compared with the tokens its slot should hold, and the first wrong
one raises.

It serves the simulation (on virtual time) and benchmarks of everything but the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from metrale_async.execution.plan import Chunk, ChunkResult, SamplerSpec, StepPlan, StepResult, TokenLogprobs

_MASK = 2**64 - 1


def chain(digest: int, token_id: int) -> int:
    """The digest of a history one token longer."""
    digest = (digest ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return digest ^ (digest >> 29)


def scripted_token(digest: int, vocab_size: int, sampler: SamplerSpec) -> int:
    """The token that follows a history; a sampling request's also depends on its seed and choice, as with a model."""
    if sampler.temperature != 0.0:
        digest = chain(digest, sampler.seed + sampler.choice)
    return (digest >> 24) % vocab_size


class CorruptKVError(AssertionError):
    """A slot of the KV memory does not hold what the sequence wrote there."""


@dataclass(slots=True)
class _Slot:
    sequence_id: int
    sampler: SamplerSpec
    tokens: list[int]
    prompt_length: int
    blocks: list[int]
    state: int
    """Digest of all tokens computed so far, as a recurrent layer carries it; independent of the KV memory."""


class ScriptedExecutor:
    """``step_s`` gives a plan's duration in seconds of the running loop's clock; ``fault`` an error for a chunk, or
    None. The tokens of a chunk that fails are not computed."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        step_s: Callable[[StepPlan], float] = lambda plan: 0.0,
        fault: Callable[[StepPlan, Chunk], Exception | None] = lambda plan, chunk: None,
        verify: bool = True,
        has_state: bool = False,
    ) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._kv = [0] * (num_blocks * block_size)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._has_state = has_state
        self._snapshots: dict[int, int] = {}
        self._step_s = step_s
        self._fault = fault
        self._verify = verify
        self._free_at_s = 0.0
        self._submitted = 0
        self._finished = 0
        self._all_finished = asyncio.Event()
        self._all_finished.set()

    async def start(self) -> None:
        self._free_at_s = asyncio.get_running_loop().time()

    def submit(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[StepResult] = loop.create_future()
        self._free_at_s = max(self._free_at_s, loop.time()) + self._step_s(plan)
        self._submitted += 1
        self._all_finished.clear()
        loop.call_at(self._free_at_s, self._finish, plan, future)
        return future

    async def close(self) -> None:
        await self._all_finished.wait()

    def _finish(self, plan: StepPlan, future: asyncio.Future[StepResult]) -> None:
        self._finished += 1
        if self._finished == self._submitted:
            self._all_finished.set()
        try:
            result = self.run(plan)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step at once."""
        for start in plan.starts:
            self._slots[start.slot] = _Slot(
                start.sequence_id,
                start.sampler,
                list(start.token_ids),
                start.prompt_length,
                list(start.blocks),
                0 if start.snapshot is None else self._snapshots[start.snapshot],
            )
            for source, target in start.copies:
                size = self._block_size
                self._kv[target * size : (target + 1) * size] = self._kv[source * size : (source + 1) * size]
        # All writes of a step come before its reads, as in a batched attention kernel.
        for chunk in plan.chunks:
            slot = self._slots[chunk.slot]
            assert slot is not None and slot.sequence_id == chunk.sequence_id
            slot.blocks.extend(chunk.new_blocks)
            for index, block in chunk.table_updates:
                slot.blocks[index] = block
            self._write(slot, chunk)
        return StepResult(tuple(self._result(plan, chunk) for chunk in plan.chunks))

    def _write(self, slot: _Slot, chunk: Chunk) -> None:
        digest = self._kv[self._address(slot, chunk.start - 1)] if chunk.start else 0
        for position in range(chunk.start, chunk.start + chunk.count):
            digest = chain(digest, slot.tokens[position])
            self._kv[self._address(slot, position)] = digest
            slot.state = chain(slot.state, slot.tokens[position])
        if chunk.snapshot is not None:
            self._snapshots[chunk.snapshot] = slot.state

    def _result(self, plan: StepPlan, chunk: Chunk) -> ChunkResult:
        slot = self._slots[chunk.slot]
        assert slot is not None
        if self._verify:
            self._check(slot, chunk)
        error = self._fault(plan, chunk)
        if error is not None:
            # The next step may be in flight already and reads whatever lies where this token should be.
            slot.tokens.append(0)
            return ChunkResult(error=error)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if slot.sampler.prompt_logprobs is not None:
            following = slot.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, slot.prompt_length)]
            prompt_logprobs = tuple(self._logprobs(token, slot.sampler.prompt_logprobs) for token in following)
        if not chunk.samples:
            return ChunkResult(prompt_logprobs=prompt_logprobs)
        position = chunk.start + chunk.count
        digest = slot.state if self._has_state else self._kv[self._address(slot, position - 1)]
        token = scripted_token(digest, self._vocab_size, slot.sampler)
        if position - slot.prompt_length < slot.sampler.min_tokens:
            while token in slot.sampler.suppressed_token_ids:
                token = (token + 1) % self._vocab_size
        del slot.tokens[position:]
        slot.tokens.append(token)
        logprobs = None if slot.sampler.logprobs is None else self._logprobs(token, slot.sampler.logprobs)
        return ChunkResult(token, logprobs, prompt_logprobs)

    def _check(self, slot: _Slot, chunk: Chunk) -> None:
        digest = 0
        for position in range(chunk.start + chunk.count):
            digest = chain(digest, slot.tokens[position])
            if self._kv[self._address(slot, position)] != digest:
                raise CorruptKVError(f"sequence {slot.sequence_id} reads a foreign token at position {position}")
        if self._has_state and slot.state != digest:
            raise CorruptKVError(f"sequence {slot.sequence_id} carries a state that is not its own")

    def _address(self, slot: _Slot, position: int) -> int:
        return slot.blocks[position // self._block_size] * self._block_size + position % self._block_size

    def _logprobs(self, token_id: int, alternatives: int) -> TokenLogprobs:
        top = tuple(((token_id + offset) % self._vocab_size, -0.5 - offset) for offset in range(alternatives))
        return TokenLogprobs(token_id, -0.5, top)
