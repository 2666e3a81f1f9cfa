"""One answer: token ids and log-probabilities are equal bit for bit whatever else runs and however a prompt is cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from metrale_async.engine import AsyncEngine, EngineArgs, RequestOutput, SamplingParams

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """What must not change."""

    token_ids: tuple[int, ...]
    logprobs: tuple[object, ...]

    @classmethod
    def of(cls, output: RequestOutput, choice: int = 0) -> Answer:
        chosen = output.choices[choice]
        assert chosen.logprobs is not None
        return cls(chosen.token_ids, chosen.logprobs)


def prompt_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size - 2) for _ in range(count)]


GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=3)
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, top_k=60, min_p=0.01, seed=1234, max_tokens=ANSWER_TOKENS, ignore_eos=True, logprobs=3
)
PENALISED = SamplingParams(
    temperature=0.8,
    seed=-5,
    frequency_penalty=0.5,
    presence_penalty=0.3,
    repetition_penalty=1.2,
    logit_bias={7: 3.0},
    min_tokens=4,
    max_tokens=ANSWER_TOKENS,
    ignore_eos=True,
    logprobs=3,
)
ALL_PARAMS = {"greedy": GREEDY, "seeded": SEEDED, "penalised": PENALISED}


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["tiny_model", "smollm2_gguf", "tiny_hybrid"])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
async def alone(model: Path, dtype: str) -> AsyncIterator[tuple[AsyncEngine, dict[str, Answer]]]:
    """An engine, and the answers it gives to each request on its own, in one piece."""
    async with AsyncEngine(model=str(model), dtype=dtype, kv_cache_gb=0.5, max_prefill_tokens=4096) as engine:
        prompt = prompt_tokens(engine.vocab_size, 75, seed=1)
        answers = {name: Answer.of(await engine.complete(prompt, params)) for name, params in ALL_PARAMS.items()}
        assert len({answer.token_ids for answer in answers.values()}) == len(answers)
        yield engine, answers


async def test_neighbours_change_nothing(alone: tuple[AsyncEngine, dict[str, Answer]]) -> None:
    engine, answers = alone
    prompt = prompt_tokens(engine.vocab_size, 75, seed=1)
    for neighbours in (1, 7, 15, 43):
        rng = random.Random(neighbours)
        noise = SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 30), ignore_eos=True)
        async with asyncio.TaskGroup() as group:
            wanted = {}
            for index in range(neighbours):
                if index == neighbours // 2:
                    for name, params in ALL_PARAMS.items():
                        wanted[name] = group.create_task(engine.complete(prompt, params))
                length = rng.randint(1, 90)
                group.create_task(engine.complete(prompt_tokens(engine.vocab_size, length, index), noise))
        assert {name: Answer.of(task.result()) for name, task in wanted.items()} == answers, f"{neighbours} neighbours"


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
async def test_chunk_size_changes_nothing(
    alone: tuple[AsyncEngine, dict[str, Answer]], model: Path, dtype: str, chunk: int
) -> None:
    engine, answers = alone
    prompt = prompt_tokens(engine.vocab_size, 75, seed=1)
    async with AsyncEngine(model=str(model), dtype=dtype, kv_cache_gb=0.5, max_prefill_tokens=chunk) as chunked:
        assert {
            name: Answer.of(await chunked.complete(prompt, params)) for name, params in ALL_PARAMS.items()
        } == answers


async def test_preemption_changes_nothing(
    alone: tuple[AsyncEngine, dict[str, Answer]], model: Path, dtype: str
) -> None:
    """A pool that holds about two of eight requests: they are preempted, computed again, and answer the same."""
    engine, answers = alone
    prompt = prompt_tokens(engine.vocab_size, 75, seed=1)
    args = EngineArgs(model=str(model), dtype=dtype, kv_cache_gb=_gib_for_blocks(model, dtype, 13), max_batch_size=8)
    async with AsyncEngine(args) as small:
        assert small.statistics().kv_blocks.total == 13
        names = list(ALL_PARAMS) * 3
        outputs = await asyncio.gather(*(small.complete(prompt, ALL_PARAMS[name]) for name in names))
        assert small.statistics().preemptions_total > 0
        for name, output in zip(names, outputs, strict=True):
            assert Answer.of(output) == answers[name]
        small.check()
        assert small.statistics().kv_blocks.used == 0


async def test_every_choice_of_a_seeded_request_is_the_same_in_any_company(
    alone: tuple[AsyncEngine, dict[str, Answer]],
) -> None:
    engine, _ = alone
    prompt = prompt_tokens(engine.vocab_size, 33, seed=3)
    params = SamplingParams(temperature=1.0, seed=77, n=4, max_tokens=12, ignore_eos=True, logprobs=0)
    first = await engine.complete(prompt, params)
    again, *_ = await asyncio.gather(
        engine.complete(prompt, params),
        *(engine.complete(prompt[: 5 + index], SamplingParams(max_tokens=20)) for index in range(9)),
    )
    assert again.choices == first.choices
    assert len({choice.token_ids for choice in first.choices}) == 4


async def test_prompt_logprobs_do_not_depend_on_chunks_and_agree_with_decode(
    alone: tuple[AsyncEngine, dict[str, Answer]], model: Path, dtype: str
) -> None:
    engine, answers = alone
    prompt = prompt_tokens(engine.vocab_size, 75, seed=1)
    scored = [*prompt, *answers["greedy"].token_ids]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    whole = await engine.complete(scored, params)
    assert whole.prompt_logprobs is not None
    assert whole.prompt_logprobs[0] is None
    assert whole.prompt_logprobs[len(prompt) :] == answers["greedy"].logprobs
    async with AsyncEngine(model=str(model), dtype=dtype, kv_cache_gb=0.5, max_prefill_tokens=7) as chunked:
        assert (await chunked.complete(scored, params)).prompt_logprobs == whole.prompt_logprobs


def _gib_for_blocks(model: Path, dtype: str, blocks: int) -> float:
    from metrale_async.models import load_config, resolve_model

    config = load_config(resolve_model(str(model), allow_download=False))
    item = 4 if dtype == "float32" else 2
    attention_layers = sum(kind != "linear_attention" for kind in config.layer_types)
    per_token = 2 * attention_layers * config.num_key_value_heads * config.head_dim * item
    return (blocks * 16 + 8) * per_token / 2**30
