"""Numbers of a running engine; /metrics, logs and tests read the same ones."""

from __future__ import annotations

from dataclasses import dataclass

from metrale_async.cache import BlockPoolStatistics, PrefixCacheStatistics


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Gauges at this moment, and totals since the start (names end in ``_total``)."""

    requests_active: int
    sequences_waiting: int
    sequences_running: int
    steps_in_flight: int
    kv_blocks: BlockPoolStatistics
    """``used`` includes blocks that only the prefix cache holds, which are free to take when they are needed."""
    prefix_cache: PrefixCacheStatistics
    steps_total: int
    step_failures_total: int
    prompt_tokens_total: int
    """Prompt rows computed, those computed again after preemption included."""
    generated_tokens_total: int
    preemptions_total: int
    requests_total: int
    requests_aborted_total: int
