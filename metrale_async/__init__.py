"""Metrale Async: an async, event-driven LLM inference engine.

    from metrale_async import AsyncEngine, SamplingParams
"""

from metrale_async.engine import (
    AsyncEngine,
    EngineArgs,
    EngineStatistics,
    GenerationStream,
    OutputDelta,
    RequestOutput,
    SamplingParams,
)
from metrale_async.errors import MetraleError

__all__ = [
    "AsyncEngine",
    "EngineArgs",
    "EngineStatistics",
    "GenerationStream",
    "MetraleError",
    "OutputDelta",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"
