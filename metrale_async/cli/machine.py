"""What this machine is: shown by ``doctor``, recorded with every benchmark result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

RELEVANT_ISA_FLAGS: Final = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
"""Instruction sets that decide how fast a matrix product or a quantised format can be, as Linux names them."""

PACKAGES: Final = ("metrale-async", "torch", "triton", "uvloop", "aiohttp", "tokenizers", "safetensors", "liburing")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine as the running process sees it."""

    cpu: str
    isa_flags: tuple[str, ...]
    physical_cores: int
    usable_cores: int
    """Logical cores this process may run on."""
    memory_bytes: int
    available_memory_bytes: int
    operating_system: str
    python: str
    packages: Mapping[str, str | None]
    """Installed version of every package that matters for speed; None if it is missing."""


def machine_facts() -> MachineFacts:
    """Read the facts anew; imports nothing heavy."""
    cpu, flags = _processor()
    memory = psutil.virtual_memory()
    return MachineFacts(
        cpu=cpu,
        isa_flags=flags,
        physical_cores=psutil.cpu_count(logical=False) or 1,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=memory.total,
        available_memory_bytes=memory.available,
        operating_system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
    )


def _processor() -> tuple[str, tuple[str, ...]]:
    """Model name and relevant instruction sets; where /proc/cpuinfo is missing, what the platform module knows."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor() or platform.machine(), ()
    # The first block describes the first core; the others repeat it.
    lines = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, tuple(flag for flag in RELEVANT_ISA_FLAGS if flag in flags)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
