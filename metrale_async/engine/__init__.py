"""Requests and their scheduling: the embedding API, a request's life, the step cycle, scheduler, sampling parameters.

May import text, cache, execution, models and kernels; knows nothing of HTTP, flags' syntax or files.
"""

from typing import TYPE_CHECKING, Any

from metrale_async.engine.engine_args import DEFAULT_MODEL, EngineArgs
from metrale_async.engine.observer import EngineObserver, RequestRecord, StepRecord
from metrale_async.engine.outputs import (
    ChoiceOutput,
    FinishReason,
    OutputDelta,
    RequestOutput,
    Usage,
)
from metrale_async.engine.sampling_params import PARAMETER_RANGES, SamplingParams
from metrale_async.engine.statistics import EngineStatistics
from metrale_async.engine.stream import GenerationStream
from metrale_async.execution import TokenLogprobs

if TYPE_CHECKING:
    from metrale_async.engine.async_engine import AsyncEngine, EngineParts, Prompt
else:

    def __getattr__(name: str) -> Any:
        # These bring torch, and the command line's --help need not wait a second for it.
        if name in ("AsyncEngine", "EngineParts", "Prompt"):
            from metrale_async.engine import async_engine

            return getattr(async_engine, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DEFAULT_MODEL",
    "PARAMETER_RANGES",
    "AsyncEngine",
    "ChoiceOutput",
    "EngineArgs",
    "EngineObserver",
    "EngineParts",
    "EngineStatistics",
    "FinishReason",
    "GenerationStream",
    "OutputDelta",
    "Prompt",
    "RequestOutput",
    "RequestRecord",
    "SamplingParams",
    "StepRecord",
    "TokenLogprobs",
    "Usage",
]
