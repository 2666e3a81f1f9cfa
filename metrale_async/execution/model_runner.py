"""Runs one step plan on a model: builds the ragged batch, runs the layers, samples.

Everything per sequence lives in slots allocated up front: its tokens, its block table, its sampler. A plan only says
what changes. State that a step changes besides KV rows (tokens, token counts) is written after all of its computation
succeeded, KV rows are the same whenever they are written, and recurrent states are read in one place and written in
another; so a step that failed can be run again chunk by chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from metrale_kernels.interface import RaggedBatch
from torch import Tensor

from metrale_async.execution.plan import (
    Chunk,
    ChunkResult,
    SamplerSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from metrale_async.execution.sampler import TokenHistory, edit_logits, sample_row, token_logprobs, uniform
from metrale_async.models import CausalLanguageModel, PagedCache

LOGIT_ROWS_AT_A_TIME = 64
"""Prompt log-probabilities are computed in pieces, so that [rows, vocabulary] stays small beside the weights."""

logger = logging.getLogger(__name__)


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN or infinite logits for a sequence: no token of it can be trusted."""


@dataclass(slots=True)
class _Slot:
    """A sequence in place."""

    sequence_id: int
    sampler: SamplerSpec
    prompt_length: int
    num_blocks: int
    history: TokenHistory | None


class ModelRunner:
    """Owns the device state of all sequences. Used by one stream thread only."""

    def __init__(
        self,
        model: CausalLanguageModel,
        caches: Sequence[PagedCache],
        states: Sequence[Tensor],
        snapshots: Sequence[Tensor],
        *,
        num_slots: int,
        block_size: int,
        max_seq_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._caches = caches
        self._states = states
        self._snapshots = snapshots
        # Of the two places each slot has for its recurrent state, the one that holds the current state.
        self._current_place = np.zeros(num_slots, dtype=np.int64)
        self._block_size = block_size
        self._device = device
        self._slots: list[_Slot | None] = [None] * num_slots
        # Tokens stay on the device, so that a sampled one feeds the next step without a way through the host; block
        # tables are the scheduler's decisions and are kept on the host. Untouched pages of both cost no memory.
        self._tokens = torch.zeros(num_slots, max_seq_len + 1, dtype=torch.int64, device=device)
        self._block_tables = np.zeros((num_slots, -(-max_seq_len // block_size) + 1), dtype=np.int32)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Put a step on the device; the returned function waits for it and gives the results.

        A fault in the batch is narrowed down by running each chunk alone, and lands on the chunk that has it.
        """
        for start in plan.starts:
            token_ids = torch.tensor(start.token_ids, dtype=torch.int64).to(self._device, non_blocking=True)
            self._tokens[start.slot, : len(start.token_ids)] = token_ids
            history = None
            if start.sampler.has_penalties:
                history = TokenHistory(token_ids, start.prompt_length, self._model.vocab_size)
            self._block_tables[start.slot, : len(start.blocks)] = start.blocks
            for source, target in start.copies:
                for cache in self._caches:
                    cache.keys[target] = cache.keys[source]
                    cache.values[target] = cache.values[source]
            self._slots[start.slot] = _Slot(
                start.sequence_id, start.sampler, start.prompt_length, len(start.blocks), history
            )
            if start.snapshot is not None:
                place = 2 * start.slot + self._current_place[start.slot]
                for states, snapshots in zip(self._states, self._snapshots, strict=True):
                    states[place] = snapshots[start.snapshot]
        for chunk in plan.chunks:
            slot = self._slot(chunk)
            end = slot.num_blocks + len(chunk.new_blocks)
            self._block_tables[chunk.slot, slot.num_blocks : end] = chunk.new_blocks
            slot.num_blocks = end
            for index, block in chunk.table_updates:
                self._block_tables[chunk.slot, index] = block
        try:
            finish = self._launch_chunks(plan.chunks)
        except Exception:
            logger.exception("a step of %d sequences failed; running them one by one", len(plan.chunks))
            return self._finish_one_by_one(plan.chunks)
        return lambda: StepResult(finish())

    def _finish_one_by_one(self, chunks: Sequence[Chunk]) -> Callable[[], StepResult]:
        results: list[ChunkResult] = []
        for chunk in chunks:
            try:
                results.extend(self._launch_chunks((chunk,))())
            except Exception as error:
                results.append(ChunkResult(error=error))
        return lambda: StepResult(tuple(results))

    def _launch_chunks(self, chunks: Sequence[Chunk]) -> Callable[[], tuple[ChunkResult, ...]]:
        batch, token_ids = self._build_batch(chunks)
        hidden = self._model.forward(token_ids, batch, self._caches, self._states)

        ends = np.cumsum([chunk.count for chunk in chunks])
        sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
        prompt_logprobs = {
            index: self._prompt_logprobs(chunk, hidden[ends[index] - chunk.count : ends[index]])
            for index, chunk in enumerate(chunks)
            if self._slot(chunk).sampler.prompt_logprobs is not None and chunk.start < self._slot(chunk).prompt_length
        }
        if not sampling:
            self._keep_new_states(chunks)
            return lambda: tuple(
                ChunkResult(prompt_logprobs=prompt_logprobs.get(index, ())) for index in range(len(chunks))
            )

        rows = torch.from_numpy(ends[sampling] - 1).to(self._device)
        logits = self._model.logits(hidden[rows])
        sampled = self._sample([chunks[index] for index in sampling], logits)
        self._keep_new_states(chunks)
        # One maximum per row tells of any NaN (it propagates) and of a row of infinities.
        finite = torch.isfinite(logits.amax(dim=-1))

        def finish() -> tuple[ChunkResult, ...]:
            token_list, finite_list = sampled.tolist(), finite.tolist()
            results = [ChunkResult(prompt_logprobs=prompt_logprobs.get(index, ())) for index in range(len(chunks))]
            for row, index in enumerate(sampling):
                if not finite_list[row]:
                    results[index] = ChunkResult(error=NonFiniteLogitsError("the model's logits are not finite"))
                    continue
                wanted = self._logprobs_wanted(chunks[index])
                logprobs = None if wanted is None else token_logprobs(logits[row], token_list[row], wanted)
                results[index] = ChunkResult(token_list[row], logprobs, prompt_logprobs.get(index, ()))
            return tuple(results)

        return finish

    def _build_batch(self, chunks: Sequence[Chunk]) -> tuple[RaggedBatch, Tensor]:
        slots = np.array([chunk.slot for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks])
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_starts[1:])
        context_lengths = starts + counts
        row_slots = np.repeat(slots, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        kv_blocks = self._block_tables[row_slots, positions // self._block_size].astype(np.int64)
        kv_slots = kv_blocks * self._block_size + positions % self._block_size
        max_context_length = int(context_lengths.max())
        tables = self._block_tables[slots, : -(-max_context_length // self._block_size)]
        position_tensor = self._to_device(positions)
        batch = RaggedBatch(
            positions=position_tensor,
            slots=self._to_device(kv_slots),
            query_starts=self._to_device(query_starts),
            context_lengths=self._to_device(context_lengths.astype(np.int32)),
            block_tables=self._to_device(tables),
            state_reads=self._to_device(2 * slots + self._current_place[slots]),
            state_writes=self._to_device(2 * slots + 1 - self._current_place[slots]),
            max_query_rows=int(counts.max()),
            max_context_length=max_context_length,
        )
        return batch, self._tokens[self._to_device(row_slots), position_tensor]

    def _keep_new_states(self, chunks: Sequence[Chunk]) -> None:
        """The step succeeded: what it wrote is the state from now on, and can be kept."""
        for chunk in chunks:
            self._current_place[chunk.slot] ^= 1
            if chunk.snapshot is not None:
                place = 2 * chunk.slot + self._current_place[chunk.slot]
                for states, snapshots in zip(self._states, self._snapshots, strict=True):
                    snapshots[chunk.snapshot] = states[place]

    def _sample(self, chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
        """logits float32 [R, V], a row per chunk -> int64 [R]; also writes the tokens where the next step reads
        them."""
        sampled = logits.argmax(dim=-1)
        for row, chunk in enumerate(chunks):
            slot = self._slot(chunk)
            if slot.sampler.is_plain_greedy:
                continue
            position = chunk.start + chunk.count
            edited = edit_logits(logits[row], slot.sampler, slot.history, position - slot.prompt_length)
            sampled[row] = sample_row(edited, slot.sampler, uniform(slot.sampler, position))
        for row, chunk in enumerate(chunks):
            history = self._slot(chunk).history
            if history is not None:
                history.add(sampled[row])
        slots = torch.tensor([chunk.slot for chunk in chunks], device=self._device)
        positions = torch.tensor([chunk.start + chunk.count for chunk in chunks], device=self._device)
        self._tokens[slots, positions] = sampled
        return sampled

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> tuple[TokenLogprobs, ...]:
        """hidden [count, hidden] of one chunk -> log-probabilities of the prompt tokens that follow its rows."""
        slot = self._slot(chunk)
        wanted = slot.sampler.prompt_logprobs
        assert wanted is not None
        count = min(chunk.count, slot.prompt_length - 1 - chunk.start)
        following = self._tokens[chunk.slot, chunk.start + 1 : chunk.start + 1 + count].tolist()
        results: list[TokenLogprobs] = []
        for first in range(0, count, LOGIT_ROWS_AT_A_TIME):
            logits = self._model.logits(hidden[first : min(first + LOGIT_ROWS_AT_A_TIME, count)])
            results.extend(
                token_logprobs(row, token_id, wanted)
                for row, token_id in zip(logits, following[first : first + LOGIT_ROWS_AT_A_TIME], strict=False)
            )
        return tuple(results)

    def _logprobs_wanted(self, chunk: Chunk) -> int | None:
        return self._slot(chunk).sampler.logprobs

    def _slot(self, chunk: Chunk) -> _Slot:
        slot = self._slots[chunk.slot]
        assert slot is not None and slot.sequence_id == chunk.sequence_id, (
            "a plan names a slot its sequence does not hold"
        )
        return slot

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device, non_blocking=True)
