"""The engine's configuration: one frozen object, declared once, built from flags or keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass

from metrale_async.arguments import argument, violations
from metrale_async.errors import ConfigurationError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Everything that decides how a model is loaded and scheduled. Names and defaults are those of ``met serve``."""

    model: str = DEFAULT_MODEL
    """A path, a catalogue name or a hub id; positional on the command line."""

    device: str = argument(
        "auto", group="Model", help="where the model runs; auto takes CUDA if present", choices=("auto", "cpu", "cuda")
    )
    dtype: str = argument(
        "auto",
        group="Model",
        help="type of weights and KV cache; auto follows the checkpoint (16-bit ones become bfloat16)",
        choices=("auto", "float32", "bfloat16"),
    )
    cpu_threads: int | None = argument(
        None, group="Model", help="compute threads on CPU; auto is one per core", minimum=1, maximum=1024, auto=True
    )

    max_seq_len: int = argument(
        32768,
        group="Scheduling",
        help="longest sequence in tokens, prompt and answer together; never above the model's own",
        minimum=16,
        maximum=2**24,
    )
    max_batch_size: int | None = argument(
        None,
        group="Scheduling",
        help="sequences computed together; auto is what memory serves well, up to 128",
        minimum=1,
        maximum=1024,
        auto=True,
    )
    max_num_seqs: int = argument(
        1024,
        group="Scheduling",
        help="sequences in the engine, waiting ones included; one more is refused with 429",
        minimum=1,
        maximum=65536,
    )
    max_prefill_tokens: int | None = argument(
        None,
        group="Scheduling",
        help="prompt tokens computed in one step; auto keeps running streams under 100 ms between tokens",
        minimum=1,
        maximum=65536,
        auto=True,
    )
    request_timeout: float = argument(
        300.0,
        group="Scheduling",
        help="seconds after which a request ends with finish_reason timeout",
        minimum=0.001,
        maximum=86400,
    )

    enable_prefix_caching: bool = argument(
        False, group="Memory", help="keep the KV blocks of finished sequences and reuse them for equal prefixes"
    )
    ssm_cache_slots: int = argument(
        16,
        group="Memory",
        help="snapshots of recurrent states for the prefix cache of hybrid models; with 0 every hit recomputes",
        minimum=0,
        maximum=65536,
    )
    ssm_checkpoint_interval: int = argument(
        256, group="Memory", help="blocks between snapshots along a prompt", minimum=1, maximum=2**20
    )
    marconi_min_tokens: int = argument(
        256, group="Memory", help="a snapshot after fewer tokens is neither taken nor used", minimum=0, maximum=2**24
    )
    block_size: int = argument(16, group="Memory", help="tokens in a KV block", minimum=1, maximum=256)
    kv_cache_gb: float | None = argument(
        None,
        group="Memory",
        help="KV cache on CPU in GiB; auto takes a quarter of the free memory, up to 4",
        minimum=0.000001,
        maximum=4096,
        auto=True,
    )
    gpu_memory_utilization: float = argument(
        0.9, group="Memory", help="share of CUDA memory the engine may use", minimum=0.05, maximum=0.99
    )

    def __post_init__(self) -> None:
        found = violations(self)
        if found:
            raise ConfigurationError(found)
