"""Prometheus metrics: gauges and totals read from the engine when they are asked for, histograms filled by its
observer calls. Every instance has a registry of its own, so two servers in one process do not mix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from metrale_async.engine import AsyncEngine, EngineStatistics, RequestRecord, StepRecord
from metrale_async.errors import EngineUnavailableError

_LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 300)
_TOKEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_LAG_BUCKETS_S: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)
_LENGTH_BUCKETS: Final = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Metrics:
    """An EngineObserver. Give it to the engine as ``observer``, then call :meth:`watch` with the engine. ``version`` is
    the serving program's own, shown as ``metrale_build_info``."""

    def __init__(self, version: str | None = None) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        if version is not None:
            Info("metrale_build", "What runs here", registry=self.registry).info({"version": version})
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _LATENCY_BUCKETS_S
        )
        self._inter_token = self._histogram("inter_token_seconds", "Between two tokens of a sequence", _TOKEN_BUCKETS_S)
        self._request_duration = self._histogram(
            "request_duration_seconds", "From a request's arrival to its end", _LATENCY_BUCKETS_S
        )
        self._queue = self._histogram(
            "queue_seconds", "From a request's arrival to its first prefill chunk", _LATENCY_BUCKETS_S
        )
        self._step = self._histogram("step_seconds", "Duration of a step", _TOKEN_BUCKETS_S)
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _LENGTH_BUCKETS)
        self._completion_tokens = self._histogram(
            "request_completion_tokens", "Generated tokens of a request, all choices together", _LENGTH_BUCKETS
        )
        self._loop_lag = self._histogram("loop_lag_seconds", "How late the event loop runs a timer", _LAG_BUCKETS_S)
        self._finished = Counter(
            "metrale_choices_finished",
            "Ended choices by reason (stop, length, timeout, abort, error)",
            ["reason"],
            registry=self.registry,
        )
        self._responses = Counter(
            "metrale_http_responses", "HTTP responses by route and status", ["route", "status"], registry=self.registry
        )

    def watch(self, engine: AsyncEngine) -> None:
        """Show the engine's own numbers too."""
        self.registry.register(_EngineCollector(engine))

    def exposition(self) -> tuple[bytes, str]:
        """Prometheus' text format, and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def loop_lag(self, lag_s: float) -> None:
        self._loop_lag.observe(lag_s)

    def response_sent(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    # EngineObserver

    def step_finished(self, record: StepRecord) -> None:
        self._step.observe(record.duration_s)
        observe = self._inter_token.observe
        for gap_s in record.inter_token_s:
            observe(gap_s)

    def request_finished(self, record: RequestRecord) -> None:
        self._request_duration.observe(record.total_s)
        self._prompt_tokens.observe(record.prompt_tokens)
        self._completion_tokens.observe(record.completion_tokens)
        if record.queue_s is not None:
            self._queue.observe(record.queue_s)
        if record.time_to_first_token_s is not None:
            self._time_to_first_token.observe(record.time_to_first_token_s)
        for reason in record.finish_reasons:
            self._finished.labels(reason).inc()

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"metrale_{name}", description, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """Reads ``AsyncEngine.statistics`` at every scrape, so the numbers are the engine's own."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("metrale_ready", "1 when a request would be accepted now", self._engine.is_ready)
        try:
            statistics = self._engine.statistics()
            model = {"model": self._engine.model_name, "max_seq_len": str(self._engine.max_seq_len)}
        except EngineUnavailableError:
            return  # still loading: there is nothing to count
        yield InfoMetricFamily("metrale_model", "What is served", model)
        yield from _gauges(statistics)
        yield from _counters(statistics)


def _gauges(statistics: EngineStatistics) -> Iterator[Metric]:
    blocks = statistics.kv_blocks
    for name, description, value in (
        ("requests_active", "Requests in the engine", statistics.requests_active),
        ("sequences_running", "Sequences that hold a batch slot", statistics.sequences_running),
        ("sequences_waiting", "Sequences that wait for one", statistics.sequences_waiting),
        ("steps_in_flight", "Steps submitted and not finished", statistics.steps_in_flight),
        ("kv_blocks_used", "KV blocks in use", blocks.used),
        ("kv_blocks_capacity", "KV blocks there are", blocks.total),
        ("prefix_cache_blocks", "KV blocks the prefix cache knows", statistics.prefix_cache.cached_blocks),
        ("prefix_cache_idle_blocks", "Those that nobody else uses", statistics.prefix_cache.evictable_blocks),
    ):
        yield GaugeMetricFamily(f"metrale_{name}", description, value)


def _counters(statistics: EngineStatistics) -> Iterator[Metric]:
    cache = statistics.prefix_cache
    for name, description, value in (
        ("requests", "Requests accepted", statistics.requests_total),
        ("requests_aborted", "Requests whose client left", statistics.requests_aborted_total),
        ("prompt_tokens", "Prompt rows computed", statistics.prompt_tokens_total),
        ("generated_tokens", "Tokens generated", statistics.generated_tokens_total),
        ("preemptions", "Sequences that gave their blocks back and were requeued", statistics.preemptions_total),
        ("prefix_cache_queries", "Sequences that were looked up", cache.queries_total),
        ("prefix_cache_hit_tokens", "Tokens that were found", cache.hit_tokens_total),
        ("prefix_cache_missed_tokens", "Tokens that were not", cache.missed_tokens_total),
        ("prefix_cache_recomputed_tokens", "Tokens computed again after preemption", cache.recomputed_tokens_total),
        ("prefix_cache_evicted_blocks", "Blocks that made room for others", cache.evicted_blocks_total),
        ("steps", "Steps finished", statistics.steps_total),
        ("step_failures", "Failures of steps", statistics.step_failures_total),
    ):
        yield CounterMetricFamily(f"metrale_{name}", description, value)
