"""An AsyncEngine over the scripted executor, with a real (byte-level) tokenizer and no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from metrale_async.cache import NoPrefixCaching, RadixPrefixCache, SnapshotLimits
from metrale_async.engine import AsyncEngine, EngineArgs, EngineObserver, EngineParts
from metrale_async.execution import Chunk, ScriptedExecutor, StepPlan
from metrale_async.text import Tokenizer

END_TOKEN_ID = 256
VOCAB_SIZE = 257


def write_byte_tokenizer(directory: Path) -> None:
    """A tokenizer.json with one token per byte and ``<|end|>``: text and tokens correspond one to one."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as LibraryTokenizer

    visible = sorted(range(33, 127)) + sorted(range(161, 173)) + sorted(range(174, 256))
    to_char = {byte: chr(byte) for byte in visible}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in to_char):
        to_char[byte] = chr(256 + offset)
    library = LibraryTokenizer(models.BPE(vocab={to_char[byte]: byte for byte in range(256)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|end|>", special=True)])
    library.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": template}))


@lru_cache(maxsize=1)
def byte_tokenizer() -> Tokenizer:
    with TemporaryDirectory() as name:
        write_byte_tokenizer(Path(name))
        return Tokenizer.from_directory(Path(name))


def scripted_parts(
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    max_batch_size: int = 8,
    max_seq_len: int = 1024,
    step_s: Callable[[StepPlan], float] = lambda plan: 0.001,
    fault: Callable[[StepPlan, Chunk], Exception | None] = lambda plan, chunk: None,
    verify: bool = True,
    vocab_size: int = VOCAB_SIZE,
    prefix_caching: bool = False,
    has_state: bool = False,
    snapshots: SnapshotLimits | None = None,
) -> EngineParts:
    executor = ScriptedExecutor(
        vocab_size=vocab_size,
        num_slots=max_batch_size,
        num_blocks=num_blocks,
        block_size=block_size,
        step_s=step_s,
        fault=fault,
        verify=verify,
        has_state=has_state,
    )
    if not has_state:
        snapshots = None
    elif snapshots is None:
        snapshots = SnapshotLimits(places=4, min_tokens=0)
    return EngineParts(
        model_name="scripted",
        tokenizer=byte_tokenizer(),
        executor=executor,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_size=max_batch_size,
        end_token_ids=frozenset({END_TOKEN_ID}),
        sampling_defaults={},
        kv_is_whole_state=not has_state,
        model_digest="scripted",
        make_prefix_cache=lambda pool, size: (
            RadixPrefixCache(pool, size, snapshots) if prefix_caching else NoPrefixCaching(pool)
        ),
    )


def scripted_engine(
    *,
    args: EngineArgs | None = None,
    observer: EngineObserver | None = None,
    draw_seed: Callable[[], int] = lambda: 7,
    **parts: Any,
) -> AsyncEngine:
    """Keyword arguments are those of :func:`scripted_parts`. The clock is the running loop's, virtual or not."""
    return AsyncEngine(
        args if args is not None else EngineArgs(),
        parts=scripted_parts(**parts),
        observer=observer,
        clock=lambda: asyncio.get_running_loop().time(),
        draw_seed=draw_seed,
    )
