"""A fault inside a step fails the request it belongs to; its neighbours' tokens do not change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from metrale_kernels.interface import RaggedBatch
from torch import Tensor

from metrale_async.engine import AsyncEngine, EngineArgs, SamplingParams
from metrale_async.errors import EngineUnavailableError, StepError
from metrale_async.models import PagedCache
from metrale_async.models.decoder import Decoder
from tests.support.scripted_engine import scripted_engine

POISON = 66
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture
def poisoned_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model raises when it meets one token."""
    forward = Decoder.forward

    def poisoned(
        self: Decoder, token_ids: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        hidden = forward(self, token_ids, batch, caches, states)
        if bool((token_ids == POISON).any()):
            raise RuntimeError("this token breaks the device")
        return hidden

    monkeypatch.setattr(Decoder, "forward", poisoned)


@pytest.fixture
def nan_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model gives NaN for a sequence that holds one token."""
    forward = Decoder.forward

    def poisoned(
        self: Decoder, token_ids: Tensor, batch: RaggedBatch, caches: Sequence[PagedCache], states: Sequence[Tensor]
    ) -> Tensor:
        hidden = forward(self, token_ids, batch, caches, states).clone()
        hidden[token_ids == POISON] = float("nan")
        return hidden

    monkeypatch.setattr(Decoder, "forward", poisoned)


async def _one_of_many_fails(model: Path) -> None:
    prompts = [[1, 2, 3], [9, 8, 7, POISON], [4, 5, 6, 7, 8, 9]]
    # So few tokens a step that the fault meets neighbours in the middle of their answers, or of their prompts.
    args = EngineArgs(model=str(model), kv_cache_gb=0.1, max_prefill_tokens=4)
    async with AsyncEngine(args) as engine:
        alone = [await engine.complete(prompt, PARAMS) for prompt in (prompts[0], prompts[2])]
        together = await asyncio.gather(
            *(engine.complete(prompt, PARAMS) for prompt in prompts), return_exceptions=True
        )
        assert isinstance(together[1], StepError)
        assert "the step failed under this request" in str(together[1])
        for got, expected in zip((together[0], together[2]), alone, strict=True):
            assert not isinstance(got, BaseException)
            assert got.choices == expected.choices
        assert engine.statistics().step_failures_total == 1
        assert engine.statistics().kv_blocks.used == 0
        engine.check()
        assert engine.is_ready


@pytest.fixture(params=["tiny_model", "tiny_hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.usefixtures("poisoned_forward")
async def test_an_exception_in_a_batch_fails_only_its_request(model: Path) -> None:
    await _one_of_many_fails(model)


@pytest.mark.usefixtures("nan_embedding")
async def test_logits_that_are_not_finite_fail_only_their_request(model: Path) -> None:
    await _one_of_many_fails(model)


async def test_a_broken_executor_fails_every_request_and_refuses_new_ones() -> None:
    engine = scripted_engine()
    async with engine:
        running = engine.submit([1, 2, 3], PARAMS)
        executor = engine._loaded.executor
        executor.run = lambda plan: (_ for _ in ()).throw(RuntimeError("gone"))  # type: ignore[attr-defined]
        with pytest.raises(StepError, match="the device failed"):
            await running.collect()
        assert not engine.is_ready
        with pytest.raises(EngineUnavailableError, match="the device failed"):
            engine.submit([1], PARAMS)
        assert engine.statistics().kv_blocks.used == 0
