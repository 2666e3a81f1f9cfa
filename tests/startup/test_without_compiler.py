"""A machine without a C compiler, or without a place to keep what was compiled, runs the reference kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def answer(model: Path, cache: Path, **environment: str) -> str:
    """What a fresh process generates with ``cache`` for a cache folder."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XDG_CACHE_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


PROGRAM = """
import asyncio, sys
from metrale_async import AsyncEngine, SamplingParams
from metrale_async.startup import choose_kernels
import torch

async def main():
    async with AsyncEngine(model=sys.argv[1], kv_cache_gb=0.01) as engine:
        output = await engine.complete("Hi", SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        print(choose_kernels(torch.device("cpu")).name, len(output.choices[0].token_ids))

asyncio.run(main())
"""


def test_no_compiler(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    assert answer(tiny_model, tmp_path / "cache", PATH=str(tmp_path / "bin")) == "reference 2\n"


def test_a_cache_folder_that_cannot_be_made(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert answer(tiny_model, tmp_path / "file" / "cache") == "reference 2\n"


def test_reference_kernels_asked_for_without_a_compiler(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environment = {"PATH": str(tmp_path / "bin"), "METRALE_KERNELS": "reference"}
    assert answer(tiny_model, tmp_path / "cache", **environment) == "reference 2\n"
