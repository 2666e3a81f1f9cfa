"""The operations in C, compiled by the machine's compiler when they are first used: what is fast on this processor."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from metrale_kernels.cpu.build import Build, load_build
from metrale_kernels.cpu.operations import CpuOperations
from metrale_kernels.errors import KernelUnavailableError

__all__ = ["KernelUnavailableError", "describe", "load_operations", "set_num_threads"]


@lru_cache(maxsize=1)
def _build() -> Build:
    return load_build()


def load_operations() -> CpuOperations:
    """Raises KernelUnavailableError when nothing can be compiled here; the message says why."""
    operations = CpuOperations(_build())
    if _num_threads() == 1:
        set_num_threads(len(os.sched_getaffinity(0)))
    return operations


def set_num_threads(count: int) -> None:
    """Size of the kernels' thread pool, the calling thread included. One pool serves the whole process."""
    function = _build().library.pool_set_threads
    function.argtypes = [ctypes.c_int64]
    function(count)


def describe() -> dict[str, str]:
    """What runs, for ``doctor``."""
    build = _build()
    return {
        "compiler": build.compiler,
        "instructions": ctypes.string_at(_text(build)).decode(),
        "library": str(build.path),
        "threads": str(_num_threads()),
    }


def _num_threads() -> int:
    function = _build().library.pool_threads
    function.restype = ctypes.c_int64
    return int(function())


def _text(build: Build) -> int:
    function = build.library.kernel_instructions
    function.restype = ctypes.c_void_p
    return int(function())
