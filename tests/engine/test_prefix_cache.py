"""With the prefix cache on, every answer is bit for bit what it is without: cold, warm at any length, evicted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from metrale_async.cache import SnapshotLimits
from metrale_async.engine import AsyncEngine, EngineArgs, RequestOutput, SamplingParams
from tests.engine.test_batch_independence import Answer, prompt_tokens
from tests.support.scripted_engine import scripted_engine

PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=2)


def answers(outputs: list[RequestOutput]) -> list[Answer]:
    return [Answer.of(output) for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_name", ["tiny_model", "smollm2_gguf"])
async def test_warm_at_every_block_offset_and_one_token_either_side(
    model_name: str, dtype: str, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(model_name)
    lengths = [1, 15, 16, 17, 18, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 96]
    async with AsyncEngine(model=str(model), dtype=dtype, kv_cache_gb=0.2) as plain:
        base = prompt_tokens(plain.vocab_size, 96, seed=4)
        # The same beginning up to each length, then another end.
        prompts = [[*base[:length], *prompt_tokens(plain.vocab_size, 9, seed=length)] for length in lengths]
        expected = answers([await plain.complete(prompt, PARAMS) for prompt in [base, *prompts]])
    async with AsyncEngine(model=str(model), dtype=dtype, kv_cache_gb=0.2, enable_prefix_caching=True) as cached:
        for _ in range(2):
            outputs = [await cached.complete(prompt, PARAMS) for prompt in [base, *prompts]]
            assert answers(outputs) == expected
        # In the second round whole blocks and the tokens of a partly matching one are found, all but the last token.
        for length, output in zip(lengths, outputs[1:], strict=True):
            prompt_length = length + 9
            assert output.usage.cached_tokens >= (prompt_length - 1) // 16 * 16
        assert outputs[0].usage.cached_tokens >= 80
        cached.check()


async def test_a_different_end_hits_up_to_the_branch(tiny_model: Path) -> None:
    async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05, enable_prefix_caching=True) as engine:
        base = prompt_tokens(engine.vocab_size, 100, seed=4)
        await engine.complete(base, PARAMS)
        for branch in range(16, 100):
            other = (base[branch] + 1) % 200
            output = await engine.complete([*base[:branch], other, 3], PARAMS)
            # A partly matching block counts token by token; the block that was never full does not.
            assert output.usage.cached_tokens >= min(branch, 96)


async def test_a_chat_goes_on_from_its_own_blocks_under_pressure(tiny_model: Path) -> None:
    """Eight conversations of four turns on a pool that holds about three of them."""

    async def converse(engine: AsyncEngine) -> list[list[Answer]]:
        async def one(seed: int) -> list[Answer]:
            history = prompt_tokens(engine.vocab_size, 40, seed=seed)
            said = []
            for turn in range(4):
                output = await engine.complete(history, PARAMS)
                said.append(Answer.of(output))
                history = [
                    *history,
                    *output.choices[0].token_ids,
                    *prompt_tokens(engine.vocab_size, 20, seed * 10 + turn),
                ]
            return said

        return await asyncio.gather(*(one(seed) for seed in range(8)))

    block_gib = 2 * 2 * 2 * 16 * 4 * 16 / 2**30
    async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05) as plain:
        expected = await converse(plain)
    args = {"model": str(tiny_model), "kv_cache_gb": 26.5 * block_gib, "max_batch_size": 8}
    async with AsyncEngine(**args, enable_prefix_caching=True) as small:  # type: ignore[arg-type]
        assert small.statistics().kv_blocks.total == 26
        assert await converse(small) == expected
        statistics = small.statistics().prefix_cache
        assert statistics.evicted_blocks_total > 0
        assert statistics.hit_tokens_total > 0
        small.check()


async def test_salts_keep_tenants_apart() -> None:
    async with scripted_engine(prefix_caching=True) as engine:
        prompt = [7] * 64
        counts = []
        for salt in ("a", "a", "b", "b", ""):
            output = await engine.submit(prompt, PARAMS, cache_salt=salt).collect()
            counts.append(output.usage.cached_tokens)
        assert counts == [0, 63, 0, 63, 0]


async def test_prompt_logprobs_are_whole_with_the_cache_on(tiny_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2)
    prompt = prompt_tokens(250, 70, seed=2)
    async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05, enable_prefix_caching=True) as engine:
        first = await engine.complete(prompt, params)
        again = await engine.complete(prompt, params)
        assert again.prompt_logprobs == first.prompt_logprobs
        assert again.usage.cached_tokens == 0
        assert (await engine.complete(prompt, PARAMS)).usage.cached_tokens == 64


async def test_choices_of_one_request_compute_its_prompt_once(tiny_model: Path) -> None:
    for caching in (False, True):
        async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05, enable_prefix_caching=caching) as engine:
            prompt = prompt_tokens(engine.vocab_size, 160, seed=9)
            params = SamplingParams(n=6, seed=1, max_tokens=4, ignore_eos=True)
            await engine.complete(prompt, params)
            # Each choice but the first computes what follows the last full block before the prompt's last token.
            assert engine.statistics().prompt_tokens_total == 160 + 5 * 16


async def test_what_a_preempted_sequence_finds_of_itself_is_no_hit() -> None:
    async with scripted_engine(prefix_caching=True, num_blocks=12, max_seq_len=128) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        rng = random.Random(0)
        prompts = [[rng.randrange(200) for _ in range(40)] for _ in range(3)]
        await asyncio.gather(*(engine.complete(prompt, params) for prompt in prompts))
        statistics = engine.statistics()
        assert statistics.preemptions_total > 0
        assert statistics.prefix_cache.hit_tokens_total == 0
        assert statistics.prefix_cache.missed_tokens_total == 120
        engine.check()


async def test_without_the_flag_nothing_is_kept(tiny_model: Path) -> None:
    async with AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05) as engine:
        for _ in range(2):
            output = await engine.complete(prompt_tokens(250, 70, seed=2), PARAMS)
            assert output.usage.cached_tokens == 0
        assert engine.statistics().kv_blocks.used == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_hybrids_start_from_snapshots_with_the_same_answers(tiny_hybrid: Path, dtype: str) -> None:
    """Cold, warm, branching, with snapshots evicted and taken again: bit for bit the answers without a cache."""
    common = {"model": str(tiny_hybrid), "dtype": dtype, "kv_cache_gb": 0.1}
    async with AsyncEngine(**common) as plain:  # type: ignore[arg-type]
        base = prompt_tokens(plain.vocab_size, 200, seed=4)
        lengths = [16, 17, 31, 33, 64, 100, 101, 160, 199]
        prompts = [base, *([*base[:length], *prompt_tokens(plain.vocab_size, 20, seed=length)] for length in lengths)]
        expected = answers([await plain.complete(prompt, PARAMS) for prompt in prompts])
    for slots in (0, 2, 64):
        async with AsyncEngine(
            **common,  # type: ignore[arg-type]
            enable_prefix_caching=True,
            marconi_min_tokens=0,
            ssm_cache_slots=slots,
            ssm_checkpoint_interval=3,
        ) as cached:
            for _ in range(3):
                outputs = [await cached.complete(prompt, PARAMS) for prompt in prompts]
                assert answers(outputs) == expected
                cached.check()
            statistics = cached.statistics().prefix_cache
            found = [output.usage.cached_tokens for output in outputs]
            if slots == 0:
                assert found == [0] * len(prompts)
            elif slots == 2:
                assert statistics.snapshots_evicted_total > 0
            else:
                # Each prompt starts at the last block boundary before its last token.
                assert found == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
            together = await asyncio.gather(*(cached.complete(prompt, PARAMS) for prompt in prompts * 2))
            assert answers(list(together)) == expected * 2


async def test_a_hybrid_hits_at_a_branch_from_the_second_request_on() -> None:
    args = EngineArgs(marconi_min_tokens=0)
    async with scripted_engine(args=args, has_state=True, prefix_caching=True) as engine:
        base = [index % 200 for index in range(160)]
        counts = []
        for ending in range(4):
            output = await engine.complete([*base[:100], 250, ending, *base[:30]], PARAMS)
            counts.append(output.usage.cached_tokens)
        # The first computes all; the second shares rows up to token 96 but no state, and keeps one there.
        assert counts[:2] == [0, 0]
        assert counts[2:] == [96, 96]


async def test_a_snapshot_at_a_small_depth_is_neither_taken_nor_used() -> None:
    args = EngineArgs(marconi_min_tokens=64)
    snapshots = SnapshotLimits(places=8, min_tokens=64)
    async with scripted_engine(args=args, has_state=True, prefix_caching=True, snapshots=snapshots) as engine:
        for length, cached in ((64, 0), (65, 64), (80, 64), (81, 80)):
            prompt = [length] * length
            await engine.complete(prompt, PARAMS)
            assert (await engine.complete(prompt, PARAMS)).usage.cached_tokens == cached
