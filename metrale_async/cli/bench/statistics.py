"""From timings to the figures of a table row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from metrale_async.cli.bench.load import Level


@dataclass(frozen=True, slots=True)
class LevelSummary:
    """One row of the ladder; times in milliseconds, None where nothing was measured."""

    concurrency: int
    requests: int
    failed: int
    duration_s: float
    prompt_tokens_mean: float
    completion_tokens: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    time_per_output_token_ms: float | None
    """Mean over requests of (last event - first) / (tokens - 1): not blind to tokens sent together, as gaps are."""


def summarize(level: Level) -> LevelSummary:
    timings = level.timings
    completion_tokens = sum(timing.completion_tokens for timing in timings)
    ttfts = [timing.first_token_s - timing.started_s for timing in timings]
    gaps = [gap for timing in timings for gap in timing.gaps_s]
    per_token = [
        sum(timing.gaps_s) / (timing.completion_tokens - 1) for timing in timings if timing.completion_tokens > 1
    ]
    return LevelSummary(
        concurrency=level.concurrency,
        requests=len(timings) + len(level.failures),
        failed=len(level.failures),
        duration_s=level.duration_s,
        prompt_tokens_mean=sum(timing.prompt_tokens for timing in timings) / max(1, len(timings)),
        completion_tokens=completion_tokens,
        output_tokens_per_s=completion_tokens / level.duration_s,
        ttft_p50_ms=percentile_ms(ttfts, 0.50),
        ttft_p99_ms=percentile_ms(ttfts, 0.99),
        inter_token_p50_ms=percentile_ms(gaps, 0.50),
        inter_token_p99_ms=percentile_ms(gaps, 0.99),
        time_per_output_token_ms=1000 * sum(per_token) / len(per_token) if per_token else None,
    )


def percentile_ms(values_s: Sequence[float], share: float) -> float | None:
    """The ``share`` quantile, linear between neighbours (as numpy's default), in milliseconds."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return 1000 * (ordered[low] + (ordered[high] - ordered[low]) * (place - low))
