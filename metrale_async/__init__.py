"""Metrale Async: an async, event-driven LLM inference engine.

    from metrale_async import AsyncEngine, SamplingParams

Names are loaded when they are first used, so that ``--help`` and the storage and kernel packages need no tokenizer
library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("metrale_async.errors" if name == "MetraleError" else "metrale_async.engine")
    return getattr(module, name)
