"""The embedding API: streams, leaving them, several engines, asyncio and uvloop, limits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from metrale_async import AsyncEngine, EngineArgs, SamplingParams
from metrale_async.engine import RequestRecord, StepRecord
from metrale_async.errors import (
    ConfigurationError,
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestTooLongError,
)
from tests.support.scripted_engine import END_TOKEN_ID, VOCAB_SIZE, scripted_engine
from tests.support.virtual_time import run_on_virtual_time

LONG = SamplingParams(max_tokens=500, ignore_eos=True, seed=1)


def idle(engine: AsyncEngine) -> bool:
    statistics = engine.statistics()
    return statistics.kv_blocks.used == statistics.requests_active == statistics.sequences_running == 0


async def test_a_stream_joins_to_the_whole_answer() -> None:
    async with scripted_engine() as engine:
        params = SamplingParams(max_tokens=40, seed=3, n=2, logprobs=1)
        whole = await engine.complete("Hello", params)
        text = {0: "", 1: ""}
        async for delta in engine.generate("Hello", params):
            text[delta.index] += delta.text
        assert text == {choice.index: choice.text for choice in whole.choices}
        assert whole.usage.prompt_tokens == 5
        assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)


async def test_leaving_a_loop_frees_everything_at_once() -> None:
    async with scripted_engine() as engine:
        async for delta in engine.submit(b"abc", LONG):
            if delta.token_ids:
                break
        del delta
        assert idle(engine)


async def test_leaving_generate_frees_everything() -> None:
    async with scripted_engine() as engine:
        async with contextlib.aclosing(engine.generate("abc", LONG)) as outputs:
            async for _ in outputs:
                break
        assert idle(engine)


async def test_dropping_a_stream_that_was_never_read_frees_it() -> None:
    async with scripted_engine() as engine:
        stream = engine.submit(b"abc", LONG)
        assert not idle(engine)
        del stream
        gc.collect()
        assert idle(engine)


async def test_a_cancelled_reader_frees_its_request() -> None:
    async with scripted_engine() as engine:
        task = asyncio.create_task(engine.complete("abc", LONG))
        while engine.statistics().generated_tokens_total == 0:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert idle(engine)


def test_two_engines_live_in_one_process_on_asyncio_and_on_uvloop(tiny_model: Path) -> None:
    async def main() -> list[tuple[int, ...]]:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        async with (
            AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05) as first,
            AsyncEngine(model=str(tiny_model), kv_cache_gb=0.05, max_batch_size=1) as second,
        ):
            outputs = await asyncio.gather(*(e.complete("Hi", params) for e in (first, second, first, second)))
            return [output.choices[0].token_ids for output in outputs]

    results = []
    for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            results += runner.run(main())
    assert len(results) == 8
    assert len(set(results)) == 1


async def test_text_ids_and_messages_are_accepted_and_other_prompts_refused() -> None:
    async with scripted_engine() as engine:
        params = SamplingParams(max_tokens=4, seed=1)
        by_text = await engine.complete("ab", params)
        by_ids = await engine.complete([97, 98], params)
        assert by_text.choices == by_ids.choices
        chat = await engine.complete([{"role": "user", "content": "hi"}], params)
        assert bytes(chat.prompt_token_ids) == b"user: hi\nassistant: "
        for wrong in ([1, "a"], [True], [1.5]):
            with pytest.raises(InvalidRequestError, match="prompt"):
                await engine.complete(wrong, params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "empty"),
        ([VOCAB_SIZE], {}, f"0 to {VOCAB_SIZE - 1}"),
        ([-1], {}, f"0 to {VOCAB_SIZE - 1}"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ],
)
async def test_what_the_model_does_not_have_is_refused(prompt: list[int], params: dict[str, Any], message: str) -> None:
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match=message):
            engine.submit(prompt, SamplingParams(**params))
        assert idle(engine)


async def test_a_request_fits_up_to_the_context_and_not_one_token_further() -> None:
    async with scripted_engine(max_seq_len=64) as engine:
        for tokens in (55, 56):
            output = await engine.complete([1] * 8, SamplingParams(max_tokens=tokens, ignore_eos=True))
            assert len(output.choices[0].token_ids) == tokens
        with pytest.raises(RequestTooLongError, match=r"8 prompt tokens and 57 .* 65; the model's context .* holds 64"):
            engine.submit([1] * 8, SamplingParams(max_tokens=57))
        with pytest.raises(RequestTooLongError):
            engine.submit([1] * 64, SamplingParams())
        rest = await engine.complete([1] * 60, SamplingParams(ignore_eos=True))
        assert (len(rest.choices[0].token_ids), rest.choices[0].finish_reason) == (4, "length")


async def test_a_request_the_kv_cache_can_never_hold_is_refused_with_both_numbers() -> None:
    async with scripted_engine(num_blocks=3, max_seq_len=1024) as engine:
        with pytest.raises(RequestTooLongError, match=r"make 49; the KV cache .* holds 48"):
            engine.submit([1] * 40, SamplingParams(max_tokens=9))
        assert len((await engine.complete([1] * 40, SamplingParams(max_tokens=8, ignore_eos=True))).choices) == 1


async def test_the_queue_is_bounded_by_sequences() -> None:
    async with scripted_engine(args=EngineArgs(max_num_seqs=3)) as engine:
        first = engine.submit([1], LONG)
        second = engine.submit([1], SamplingParams(n=2, max_tokens=400, ignore_eos=True))
        with pytest.raises(QueueFullError, match="--max-num-seqs allows 3") as refused:
            engine.submit([1], LONG)
        assert refused.value.retry_after_s >= 1
        first.abort()
        engine.submit([1], LONG).abort()
        second.abort()
        assert idle(engine)


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    async with scripted_engine() as engine:
        running = asyncio.create_task(engine.complete([1], SamplingParams(max_tokens=20, ignore_eos=True)))
        await asyncio.sleep(0)
        engine.stop_admission()
        with pytest.raises(EngineUnavailableError, match="shutting down"):
            engine.submit([1], LONG)
        assert await engine.drain(10.0)
        assert len((await running).choices[0].token_ids) == 20


async def test_closing_fails_what_still_runs() -> None:
    engine = scripted_engine()
    await engine.start()
    running = asyncio.create_task(engine.complete([1], LONG))
    await asyncio.sleep(0)
    assert not await engine.drain(0.0)
    await engine.close()
    with pytest.raises(EngineUnavailableError, match="closing"):
        await running


def test_a_deadline_ends_a_request_with_the_text_it_has() -> None:
    async def main() -> None:
        args = EngineArgs(request_timeout=0.5)
        async with scripted_engine(args=args, step_s=lambda plan: 0.01) as engine:
            params = SamplingParams(max_tokens=900, ignore_eos=True, stop=("\x00never\x00",), n=2, seed=1)
            output = await engine.complete([1], params)
            assert [choice.finish_reason for choice in output.choices] == ["timeout", "timeout"]
            assert all(45 <= len(choice.token_ids) <= 55 for choice in output.choices)
            whole = [bytes(choice.token_ids).decode(errors="replace") for choice in output.choices]
            assert [choice.text for choice in output.choices] == whole
            assert idle(engine)

    run_on_virtual_time(main())


async def test_stop_strings_stop_tokens_and_end_tokens_say_what_they_are() -> None:
    async with scripted_engine() as engine:
        free = await engine.complete([5], SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=1.0))
        text = free.choices[0].text
        tokens = free.choices[0].token_ids
        stop = text[10:13]
        by_string = await engine.complete(
            [5], SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=1.0, stop=(stop,))
        )
        assert by_string.choices[0].finish_reason == "stop"
        assert by_string.choices[0].stop_reason == stop
        assert by_string.choices[0].text == text[: text.index(stop)]
        by_token = await engine.complete(
            [5], SamplingParams(max_tokens=60, ignore_eos=True, seed=2, temperature=1.0, stop_token_ids=(tokens[9],))
        )
        assert by_token.choices[0].stop_reason == tokens[9]
        assert by_token.choices[0].token_ids == tokens[: tokens.index(tokens[9]) + 1]
        ended = [
            output
            for prompt in range(40)
            if (output := await engine.complete([prompt], SamplingParams(max_tokens=60))).choices[0].finish_reason
            == "stop"
        ]
        assert ended
        assert all(output.choices[0].token_ids[-1] == END_TOKEN_ID for output in ended)
        assert all(output.choices[0].stop_reason is None for output in ended)


async def test_prompt_logprobs_arrive_once_and_complete_also_after_preemption() -> None:
    records: list[RequestRecord] = []

    class Observer:
        def step_finished(self, record: StepRecord) -> None: ...

        def request_finished(self, record: RequestRecord) -> None:
            records.append(record)

    async with scripted_engine(num_blocks=8, max_seq_len=128, observer=Observer()) as engine:
        params = SamplingParams(max_tokens=60, ignore_eos=True, prompt_logprobs=1)
        outputs = await asyncio.gather(*(engine.complete([index] * 30, params) for index in range(3)))
    assert sum(record.preemptions for record in records) > 0
    for index, output in enumerate(outputs):
        assert output.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None] + [index] * 29


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": 0}, "--block-size is 0; allowed: 1 to 256"),
        ({"device": "tpu"}, "one of auto, cpu, cuda"),
        ({"max_batch_size": 0}, "--max-batch-size"),
        ({"kv_cache_gb": float("nan")}, "--kv-cache-gb"),
    ],
)
def test_flags_are_checked_in_the_words_of_the_command_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AsyncEngine(**flags)


def test_all_violations_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as error:
        AsyncEngine(block_size=0, max_num_seqs=0, dtype="fp4")
    assert len(error.value.violations) == 3


async def test_the_reader_of_a_failed_load_gets_the_models_error() -> None:
    engine = AsyncEngine(model="/no/such/model")
    with pytest.raises(Exception, match="no/such/model"):
        async with engine:
            pass
    assert not engine.is_ready
    calls: list[Callable[[], object]] = [engine.statistics, lambda: engine.submit([1], LONG)]
    for call in calls:
        with pytest.raises(EngineUnavailableError):
            call()
