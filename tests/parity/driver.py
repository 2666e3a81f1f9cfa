"""Runs a CausalLanguageModel directly: one sequence, a small paged cache, no engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from metrale_kernels.interface import RaggedBatch

from metrale_async.models import CausalLanguageModel, PagedCache, PagedState, RecurrentState

BLOCK_SIZE = 16


class SequenceDriver:
    """One sequence of at most ``capacity_tokens``; its blocks are scattered, so block tables are really followed."""

    def __init__(self, model: CausalLanguageModel, capacity_tokens: int) -> None:
        self._model = model
        blocks = -(-capacity_tokens // BLOCK_SIZE)
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
        self._block_table = order.to(torch.int32)[None]
        self._caches = [
            # NaN in unwritten rows: whoever reads past the context or into a foreign block is found out.
            PagedCache(*(torch.full((blocks, s.heads, BLOCK_SIZE, s.head_dim), torch.nan, dtype=s.dtype) for _ in "kv"))
            for layer in model.states
            for s in layer
            if isinstance(s, PagedState)
        ]
        self._states = [
            torch.full((2, *s.shape), torch.nan, dtype=s.dtype)
            for layer in model.states
            for s in layer
            if isinstance(s, RecurrentState)
        ]
        self._place = 0
        self.length = 0

    def step(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens -> float32 logits [tokens, vocab] of their positions."""
        start, self.length = self.length, self.length + len(token_ids)
        positions = torch.arange(start, self.length)
        batch = RaggedBatch(
            positions=positions,
            slots=self._block_table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_starts=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            context_lengths=torch.tensor([self.length], dtype=torch.int32),
            block_tables=self._block_table,
            state_reads=torch.tensor([self._place]),
            state_writes=torch.tensor([1 - self._place]),
            max_query_rows=len(token_ids),
            max_context_length=self.length,
        )
        self._place = 1 - self._place
        hidden = self._model.forward(torch.tensor(token_ids, dtype=torch.int64), batch, self._caches, self._states)
        return self._model.logits(hidden)


def prompt_logits(model: CausalLanguageModel, prompt: Sequence[int], chunk_tokens: int) -> torch.Tensor:
    """float32 [prompt, vocab]: logits at every position, the prompt fed in chunks of ``chunk_tokens``."""
    driver = SequenceDriver(model, len(prompt))
    chunks = [prompt[start : start + chunk_tokens] for start in range(0, len(prompt), chunk_tokens)]
    return torch.cat([driver.step(chunk) for chunk in chunks])


def greedy_tokens(model: CausalLanguageModel, prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` most likely tokens after ``prompt``, decoded one by one."""
    driver = SequenceDriver(model, len(prompt) + count)
    tokens = [int(driver.step(prompt)[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(driver.step(tokens[-1:])[-1].argmax()))
    return tokens
