"""Compiling, keeping and choosing kernels."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from metrale_kernels import KernelUnavailableError, select_operations
from metrale_kernels.cpu import build as module
from metrale_kernels.cpu import describe
from metrale_kernels.cpu.build import load_build

from tests.kernels.cases import implementations

needs_compiler = pytest.mark.skipif("cpu" not in implementations(), reason="there is no C compiler here")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that answers --version and fails at everything else."""
    path = tmp_path / "bin" / "cc"
    path.parent.mkdir()
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "error: no such luck" >&2\nexit 1\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match="no C compiler found"):
        load_build(folder=tmp_path / "kernels")


@pytest.mark.usefixtures("fake_compiler")
def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(KernelUnavailableError, match="cc failed: error: no such luck"):
        load_build(folder=tmp_path / "kernels")


@needs_compiler
def test_a_build_is_kept_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    first = load_build(folder=tmp_path)
    made_at = first.path.stat().st_mtime_ns
    assert load_build(folder=tmp_path).path.stat().st_mtime_ns == made_at
    for damage in (b"", first.path.read_bytes()[:-100], b"\x7fELF garbage"):
        # A new file, because the old one is mapped into this process.
        damaged = tmp_path / "damaged"
        damaged.write_bytes(damage)
        damaged.replace(first.path)
        assert load_build(folder=tmp_path).path.stat().st_size > 10_000
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".sha256", ".so"]


@needs_compiler
def test_two_processes_build_once(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from metrale_kernels.cpu import build;"
        f"print(build.load_build(folder=Path({str(tmp_path)!r})).path.stat().st_mtime_ns)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) for _ in range(2)
    ]
    times = {process.communicate(timeout=110)[0] for process in started}
    assert len(times) == 1
    assert times != {b""}


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: owner + 1)
    with pytest.raises(KernelUnavailableError, match="belongs to another user"):
        module._make_private(tmp_path)


@needs_compiler
def test_the_compiled_implementation_is_chosen_and_described() -> None:
    selection = select_operations(torch.device("cpu"))
    assert (selection.name, selection.operations.name) == ("cpu", "cpu")
    assert describe()["instructions"] in ("avx512-bf16", "avx512", "portable")
    assert select_operations(torch.device("cpu"), "reference").name == "reference"


def test_the_reference_runs_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KernelUnavailableError("no C compiler found")

    monkeypatch.setattr("metrale_kernels.cpu.load_operations", fail)
    selection = select_operations(torch.device("cpu"))
    assert selection.name == "reference"
    assert "no C compiler found" in selection.reason
    with pytest.raises(KernelUnavailableError, match="no C compiler found"):
        select_operations(torch.device("cpu"), "cpu")


@pytest.mark.parametrize(("device", "requested"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_an_implementation_that_cannot_run_is_refused_by_name(device: str, requested: str) -> None:
    with pytest.raises(KernelUnavailableError, match=requested):
        select_operations(torch.device(device), requested)
