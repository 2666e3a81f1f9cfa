"""Where steps run: plans and results, executors, stream threads, the model runner and the sampler. Imports models and
kernels, nothing above. This file names only what needs no torch; ``model_runner``, ``sampler`` and ``local_executor``
are imported by those who load a model."""

from metrale_async.execution.executor import Executor
from metrale_async.execution.plan import (
    Chunk,
    ChunkResult,
    SamplerSpec,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from metrale_async.execution.scripted import ScriptedExecutor

__all__ = [
    "Chunk",
    "ChunkResult",
    "Executor",
    "SamplerSpec",
    "ScriptedExecutor",
    "SequenceStart",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
]
