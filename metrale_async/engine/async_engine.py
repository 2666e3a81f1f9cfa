"""The embedding API: a model behind ``generate`` and ``complete``, and the admission of requests.

async with AsyncEngine(model="smollm2-135m") as engine:
    async for delta in engine.generate("Once upon a time", SamplingParams(max_tokens=32)):
        print(delta.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from metrale_async.cache import BlockPool, NoPrefixCaching, PrefixCache, root_hash
from metrale_async.engine.channel import DeltaChannel
from metrale_async.engine.engine_args import EngineArgs
from metrale_async.engine.observer import EngineObserver
from metrale_async.engine.outputs import OutputDelta, RequestOutput
from metrale_async.engine.prefill_budget import PrefillBudget
from metrale_async.engine.request import Choice, Request
from metrale_async.engine.sampling_params import SamplingParams
from metrale_async.engine.scheduler import Scheduler, SchedulerLimits
from metrale_async.engine.sequence import Sequence as EngineSequence
from metrale_async.engine.statistics import EngineStatistics
from metrale_async.engine.step_loop import StepLoop
from metrale_async.engine.stream import GenerationStream
from metrale_async.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    QueueFullError,
    RequestTooLongError,
)
from metrale_async.execution import Executor, SamplerSpec
from metrale_async.text import Tokenizer

RETRY_AFTER_S: Final = 1
"""What a refused client is told to wait: a place in the queue frees up with every finished request."""
CLOSE_TIMEOUT_S: Final = 30.0
"""How long closing waits for the step in flight."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages (dicts with ``role`` and ``content``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What a loaded model contributes to an engine; built by ``startup``, or by hand in tests."""

    model_name: str
    tokenizer: Tokenizer
    executor: Executor
    vocab_size: int
    max_seq_len: int
    """The model's own limit and ``--max-seq-len``, whichever is lower."""
    num_blocks: int
    block_size: int
    max_batch_size: int
    end_token_ids: frozenset[int]
    kv_is_whole_state: bool
    """The model keeps nothing per sequence but KV rows."""
    model_digest: str
    """Fingerprint of everything KV rows depend on beside tokens."""
    make_prefix_cache: Callable[[BlockPool, int], PrefixCache] = lambda pool, block_size: NoPrefixCaching(pool)
    """From the pool and the block size; what ``--enable-prefix-caching`` and the model allow."""
    sampling_defaults: Mapping[str, Any]
    """Sampling parameters the checkpoint's generation_config sets."""


class AsyncEngine:
    """A served model. Keyword arguments are the fields of EngineArgs; there is no state outside the object.

    ``parts`` replaces loading a model, ``clock`` the monotonic clock (seconds); tests pass both.
    """

    def __init__(
        self,
        args: EngineArgs | None = None,
        *,
        parts: EngineParts | None = None,
        observer: EngineObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        progress: Callable[[str, int, int], None] | None = None,
        **flags: Any,
    ) -> None:
        if args is not None and flags:
            raise TypeError(f"pass EngineArgs or its fields as keywords, not both: {', '.join(sorted(flags))}")
        self.args = args if args is not None else EngineArgs(**flags)
        self._parts = parts
        self._observer = observer
        self._clock = clock
        self._draw_seed = draw_seed
        self._progress = progress
        self._loop: StepLoop | None = None
        self._stepping: asyncio.Task[None] | None = None
        self._accepts_requests = False
        self._unavailable_reason = "the model is still loading"
        self._next_sequence_id = 0
        self._next_request = 0
        self._request_prefix = secrets.token_hex(6)

    # Life

    async def start(self) -> None:
        """Load the model and begin to step. Raises ModelError or ConfigurationError if it cannot be served."""
        if self._loop is not None:
            raise RuntimeError("an engine starts once")
        if self._parts is None:
            # Importing torch takes a second, in which the loop has others to serve.
            load_engine_parts = await asyncio.to_thread(_import_loader)
            self._parts = await load_engine_parts(self.args, self._progress)
        parts = self._parts
        await parts.executor.start()
        pool = BlockPool(parts.num_blocks)
        scheduler = Scheduler(
            pool,
            parts.make_prefix_cache(pool, parts.block_size),
            SchedulerLimits(
                block_size=parts.block_size,
                max_batch_size=parts.max_batch_size,
                kv_is_whole_state=parts.kv_is_whole_state,
                snapshot_interval_blocks=self.args.ssm_checkpoint_interval,
                snapshot_min_tokens=self.args.marconi_min_tokens,
            ),
        )
        budget = PrefillBudget(self.args.max_prefill_tokens)
        self._loop = StepLoop(scheduler, parts.executor, budget, self._clock, self._observer)
        self._stepping = asyncio.create_task(self._run(self._loop), name="metrale-step-loop")
        self._accepts_requests = True

    async def close(self) -> None:
        """Fail what still runs, finish the step in flight, and let go of the device."""
        self.stop_admission()
        if self._stepping is not None:
            assert self._loop is not None
            self._loop.fail_all(EngineUnavailableError("the engine is closing"))
            self._stepping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepping
            self._stepping = None
        if self._parts is not None:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._parts.executor.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def stop_admission(self) -> None:
        """Refuse new requests from now on; running ones go on."""
        self._accepts_requests = False
        self._unavailable_reason = "the engine is shutting down"

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no request is left, at most ``timeout_s`` seconds; says whether that came about."""
        if self._loop is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._loop.wait_idle()
        except TimeoutError:
            return False
        return True

    async def _run(self, loop: StepLoop) -> None:
        try:
            await loop.run()
        except Exception:
            # run() has logged it and failed every request with it; what is left is to refuse new ones.
            self._accepts_requests = False
            self._unavailable_reason = "the device failed"

    # What is served

    @property
    def is_ready(self) -> bool:
        """A request would be accepted now."""
        return self._accepts_requests

    @property
    def model_name(self) -> str:
        return self._loaded.model_name

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def vocab_size(self) -> int:
        return self._loaded.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self._loaded.max_seq_len

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """What the checkpoint's generation_config sets; requests start from it."""
        return self._loaded.sampling_defaults

    def statistics(self) -> EngineStatistics:
        return self._running_loop.statistics()

    def check(self) -> None:
        """Integrity of scheduler and block pool. Raises AssertionError when wrong."""
        self._running_loop.check()

    # Requests

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> GenerationStream:
        """Accept a request of token ids, or refuse it before anything happens.

        Cached prefixes are shared only among requests of the same ``cache_salt``.
        Raises InvalidRequestError (RequestTooLongError if it can never fit), QueueFullError or EngineUnavailableError.
        """
        if not self._accepts_requests:
            raise EngineUnavailableError(self._unavailable_reason)
        loop, parts = self._running_loop, self._loaded
        prompt = tuple(prompt_token_ids)
        params.check_vocabulary(parts.vocab_size)
        max_new_tokens = self._max_new_tokens(prompt, params)
        if request_id is None:
            request_id = f"{self._request_prefix}-{self._next_request}"
            self._next_request += 1
        elif request_id in loop:
            raise InvalidRequestError(f"request id {request_id!r} is in use", param="request_id")
        if loop.num_sequences + params.n > self.args.max_num_seqs:
            raise QueueFullError(
                f"{loop.num_sequences} sequences are in the engine and this request asks for {params.n}; "
                f"--max-num-seqs allows {self.args.max_num_seqs}",
                retry_after_s=RETRY_AFTER_S,
            )
        seed = params.seed if params.seed is not None else self._draw_seed()
        end_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else parts.end_token_ids)
        hash_root = root_hash(parts.model_digest, salt=cache_salt)
        choices: list[Choice] = []
        for index in range(params.n):
            sequence = EngineSequence(
                sequence_id=self._next_sequence_id,
                prompt_token_ids=prompt,
                max_new_tokens=max_new_tokens,
                sampler=_sampler_spec(params, seed, index, end_token_ids),
                end_token_ids=end_token_ids,
                min_tokens=params.min_tokens,
                leader=choices[0].sequence if choices else None,
                hash_root=hash_root,
                # Rows that are not computed give no log-probabilities.
                reads_prefix_cache=params.prompt_logprobs is None,
            )
            self._next_sequence_id += 1
            choices.append(Choice(index, sequence, parts.tokenizer, params))
        channel = DeltaChannel()
        now_s = self._clock()
        loop.add(Request(request_id, prompt, channel, choices, params, now_s, now_s + self.args.request_timeout))
        return GenerationStream(request_id, prompt, channel, loop.abort)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Stream the answer to a prompt: text (completed as it is), token ids, or chat messages (rendered by the
        model's chat template). Leaving the loop ends the request. Raises what :meth:`submit` raises.
        """
        stream = await self._open(prompt, params, request_id)
        async with stream:
            async for delta in stream:
                yield delta

    async def complete(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestOutput:
        """The whole answer to a prompt; arguments and errors as :meth:`generate`."""
        stream = await self._open(prompt, params, request_id)
        return await stream.collect()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Sampling parameters from the checkpoint's generation_config, with ``overrides``."""
        return SamplingParams(**{**self.sampling_defaults, **overrides})

    async def _open(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> GenerationStream:
        params = params if params is not None else self.default_params()
        return self.submit(await self._tokenize(prompt), params, request_id=request_id)

    async def _tokenize(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            return await tokenizer.encode_async(prompt, add_special_tokens=True)
        items = list(prompt)
        messages = [item for item in items if isinstance(item, Mapping)]
        if messages and len(messages) == len(items):
            return await tokenizer.encode_chat_async(messages)
        token_ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(token_ids) != len(items):
            raise InvalidRequestError("prompt must be text, token ids or chat messages", param="prompt")
        return token_ids

    def _max_new_tokens(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """How many tokens the request may generate; refuses one that can never fit."""
        parts = self._loaded
        if not prompt:
            raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < parts.vocab_size:
                raise InvalidRequestError(
                    f"prompt holds token id {token_id}; allowed: 0 to {parts.vocab_size - 1}", param="prompt"
                )
        capacity = parts.num_blocks * parts.block_size
        limit = min(parts.max_seq_len, capacity)
        what = (
            "the model's context (--max-seq-len)"
            if parts.max_seq_len <= capacity
            else "the KV cache (--kv-cache-gb or --gpu-memory-utilization)"
        )
        wanted = params.max_tokens if params.max_tokens is not None else max(1, params.min_tokens)
        if len(prompt) + wanted > limit:
            asked = f"{len(prompt)} prompt tokens and {wanted} to generate make {len(prompt) + wanted}"
            raise RequestTooLongError(
                f"{asked}; {what} holds {limit}", param="max_tokens" if params.max_tokens else "prompt"
            )
        return wanted if params.max_tokens is not None else limit - len(prompt)

    @property
    def _loaded(self) -> EngineParts:
        if self._parts is None:
            raise EngineUnavailableError("the model is still loading")
        return self._parts

    @property
    def _running_loop(self) -> StepLoop:
        if self._loop is None:
            raise EngineUnavailableError("the model is still loading")
        return self._loop


def _import_loader() -> Callable[..., Awaitable[EngineParts]]:
    # The one arrow upwards: an embedding program constructs AsyncEngine and nothing else.
    from metrale_async.startup import load_engine_parts

    return load_engine_parts


def _sampler_spec(params: SamplingParams, seed: int, choice: int, end_token_ids: frozenset[int]) -> SamplerSpec:
    return SamplerSpec(
        temperature=params.temperature,
        top_k=max(0, params.top_k),
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=seed & (2**64 - 1),
        choice=choice,
        logprobs=params.logprobs,
        # The choices of a request have one prompt, so one of them reports it.
        prompt_logprobs=params.prompt_logprobs if choice == 0 else None,
        min_tokens=params.min_tokens,
        suppressed_token_ids=tuple(sorted(end_token_ids)),
    )
