"""From EngineArgs to the parts of an engine: the model, its memory, its executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import anyio.to_thread
import torch
from metrale_kernels import KernelUnavailableError, Selection, select_operations
from metrale_kernels.cpu import set_num_threads

from metrale_async.engine import EngineArgs, EngineParts, SamplingParams
from metrale_async.errors import CheckpointError, ConfigurationError, InvalidRequestError
from metrale_async.execution.local_executor import LocalExecutor
from metrale_async.execution.model_runner import ModelRunner
from metrale_async.models import GenerationDefaults, LayerState, ModelSource, load_model, resolve_model
from metrale_async.models.gguf_file import GgufFile
from metrale_async.startup.memory import (
    KVCacheSize,
    allocate_caches,
    allocate_states,
    auto_batch_size,
    available_memory_bytes,
    bytes_per_block,
    cpu_kv_bytes,
    kv_cache_size,
    most_sequences,
    recurrent_bytes,
    recurrent_states,
)
from metrale_async.startup.prefix_cache import build_prefix_cache
from metrale_async.text import Tokenizer

KERNELS_VARIABLE: Final = "METRALE_KERNELS"

Progress = Callable[[str, int, int], None]
"""What is being done, bytes done, bytes in all."""

logger = logging.getLogger(__name__)


async def load_engine_parts(args: EngineArgs, progress: Progress | None = None) -> EngineParts:
    """Load what ``args`` names; the blocking work is done on a worker thread.

    Raises ModelError if the model cannot be served and ConfigurationError if it does not fit this machine.
    """
    return await anyio.to_thread.run_sync(_load, args, progress)


def choose_device(requested: str) -> torch.device:
    """``--device``: auto takes CUDA where there is one. Raises ConfigurationError."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("--device is cuda, but torch finds no CUDA device; use cpu or auto")
    if requested == "cuda" or (requested == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def choose_kernels(device: torch.device) -> Selection:
    """The implementation ``METRALE_KERNELS`` asks for, or the best there is. Raises ConfigurationError."""
    try:
        return select_operations(device, os.environ.get(KERNELS_VARIABLE, "auto"))
    except KernelUnavailableError as error:
        raise ConfigurationError(f"{KERNELS_VARIABLE}: {error}") from error


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The tokenizer that comes with a model. Raises ModelError."""
    if source.kind == "gguf":
        return Tokenizer.from_gguf_metadata(GgufFile(source.path).metadata)
    return Tokenizer.from_directory(source.path)


def _load(args: EngineArgs, progress: Progress | None) -> EngineParts:
    device = choose_device(args.device)
    threads = args.cpu_threads or len(os.sched_getaffinity(0))
    selection = choose_kernels(device)
    logger.info("kernels: %s (%s)", selection.name, selection.reason)
    source = resolve_model(args.model, allow_download=False)
    tokenizer = load_tokenizer(source)
    report = None if progress is None else lambda done, total: progress(source.display_name, done, total)
    loaded = load_model(
        source,
        device=device,
        dtype=args.dtype,
        operations=selection.operations,
        progress=report,
        max_sequence_tokens=args.max_seq_len,
    )
    model = loaded.model
    max_seq_len = min(args.max_seq_len, model.max_position_embeddings)
    size, max_batch_size = _size_memory(args, model.states, max_seq_len, device)
    caches = allocate_caches(model.states, size.num_blocks, args.block_size, device)
    logger.info(
        "model %s: %s, weights %.0f MiB, KV cache %d blocks of %d tokens (%.0f MiB), %d sequences of up to %d tokens",
        source.display_name,
        str(loaded.dtype).removeprefix("torch."),
        model.weight_bytes / 2**20,
        size.num_blocks,
        args.block_size,
        size.nbytes / 2**20,
        max_batch_size,
        max_seq_len,
    )
    runner = ModelRunner(
        model,
        caches,
        # Two places per slot, see ModelRunner.
        allocate_states(model.states, 2 * max_batch_size, device),
        allocate_states(model.states, args.ssm_cache_slots if args.enable_prefix_caching else 0, device),
        num_slots=max_batch_size,
        block_size=args.block_size,
        max_seq_len=max_seq_len,
        device=device,
    )

    def prepare_thread() -> None:
        if device.type == "cpu":
            if selection.name == "cpu":
                # Loads the compiled library, which exists only where these kernels were chosen.
                set_num_threads(threads)
            # torch's own pool would fight the kernels' for the same cores; without ours, torch does the work.
            torch.set_num_threads(1 if selection.name == "cpu" else threads)

    return EngineParts(
        model_name=source.display_name,
        tokenizer=tokenizer,
        executor=LocalExecutor(runner, device, prepare_thread=prepare_thread),
        vocab_size=model.vocab_size,
        max_seq_len=max_seq_len,
        num_blocks=size.num_blocks,
        block_size=args.block_size,
        max_batch_size=max_batch_size,
        kv_is_whole_state=not recurrent_states(model.states),
        model_digest=f"{loaded.digest} {selection.name}",
        make_prefix_cache=build_prefix_cache(args, loaded.config.model_type, model.states),
        end_token_ids=_end_token_ids(loaded.generation_defaults, tokenizer),
        sampling_defaults=_sampling_defaults(loaded.generation_defaults),
    )


def _size_memory(
    args: EngineArgs, states: Sequence[Sequence[LayerState]], max_seq_len: int, device: torch.device
) -> tuple[KVCacheSize, int]:
    """The KV cache, and how many sequences run at a time."""
    block_bytes, sequence_bytes = bytes_per_block(states, args.block_size), recurrent_bytes(states)
    if device.type == "cpu":
        budget = cpu_kv_bytes(args.kv_cache_gb, available_memory_bytes())
        batch = args.max_batch_size or most_sequences(budget, sequence_bytes)
    else:
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * args.gpu_memory_utilization) - (total - free)
        batch = args.max_batch_size or most_sequences(budget, sequence_bytes)
        # On CPU the KV cache has the size that was asked for; here it gets what is left.
        budget -= batch * sequence_bytes
    blocks_per_sequence = -(-max_seq_len // args.block_size)
    size = kv_cache_size(budget, block_bytes, most_useful_blocks=batch * blocks_per_sequence)
    return size, args.max_batch_size or min(batch, auto_batch_size(size.num_blocks * args.block_size))


def _end_token_ids(defaults: GenerationDefaults, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(defaults.eos_token_ids) | frozenset(tokenizer.eos_token_ids)


def _sampling_defaults(defaults: GenerationDefaults) -> dict[str, Any]:
    """What generation_config sets; the rest stays neutral. Raises CheckpointError for values no request could ask
    for."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: value for name in names if (value := getattr(defaults, name)) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        raise CheckpointError(f"the checkpoint's sampling defaults are unusable: {error.message}") from error
    return found
