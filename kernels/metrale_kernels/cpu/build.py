"""Compiles the C sources with the machine's compiler on first use, and finds the result again afterwards.

A build is named by a hash of everything it depends on (sources, compiler, flags, processor), so a change of any of them
makes a new one. Its file is used only if its digest, kept beside it, is right.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from metrale_kernels.errors import KernelUnavailableError

SOURCES: Final = Path(__file__).parent / "src"
COMPILERS: Final = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S: Final = 120
FLAGS: Final = (
    "-O3",
    "-std=gnu11",
    # Fusing a multiplication with an addition is allowed everywhere alike; nothing else may change a result.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-Wno-psabi",
)


@dataclass(frozen=True, slots=True)
class Build:
    """A shared library and how it came about."""

    library: ctypes.CDLL
    path: Path
    compiler: str
    flags: tuple[str, ...]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/metrale-async/kernels``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "metrale-async" / "kernels"


def load_build(*, portable: bool = False, folder: Path | None = None) -> Build:
    """Load the library, compiling it if there is no intact build. ``portable`` leaves out every instruction set path.

    Raises KernelUnavailableError: no compiler, a failed compilation, or no folder of the user's own to keep the result
    in.
    """
    compiler, version = _find_compiler()
    flags = _flags(portable)
    folder = folder if folder is not None else cache_folder()
    _make_private(folder)
    path = folder / f"kernels-{_key(version, flags)}.so"
    with (folder / "lock").open("w") as lock:
        # A second process waits here instead of compiling the same.
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = _load_intact(path)
        if library is None:
            _compile(compiler, flags, path)
            library = _load_intact(path)
    if library is None:
        raise KernelUnavailableError(f"the compiled library cannot be loaded: {path.name}")
    return Build(library, path, version, flags)


def _find_compiler() -> tuple[str, str]:
    """Path and version line of a C compiler."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return path, shown.splitlines()[0] if shown else name
    raise KernelUnavailableError(f"no C compiler found (looked for {', '.join(COMPILERS)})")


def _flags(portable: bool) -> tuple[str, ...]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return (*FLAGS, native, *(["-DMETRALE_PORTABLE"] if portable else []))


def _key(version: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update("\0".join([version, *flags, platform.machine(), _cpu_flags()]).encode())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor()
    lines = cpuinfo.read_text(errors="replace").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _make_private(folder: Path) -> None:
    """Code is loaded from this folder, so it must belong to this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            raise KernelUnavailableError(f"{folder} belongs to another user; set XDG_CACHE_HOME")
        if status.st_mode & 0o077:
            folder.chmod(0o700)
    except OSError as error:
        raise KernelUnavailableError(f"no folder for compiled kernels: {error}") from error


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        made = Path(name) / path.name
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        command = [compiler, *flags, *sources, "-o", str(made), "-lpthread", "-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            raise KernelUnavailableError(f"the compiler did not run: {error}") from error
        if result.returncode != 0:
            last = result.stderr.strip().splitlines()[-1:] or ["no message"]
            raise KernelUnavailableError(f"{Path(compiler).name} failed: {last[0]}")
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        _digest_file(path).write_text(digest)
        made.replace(path)


def _load_intact(path: Path) -> ctypes.CDLL | None:
    """The library, if its file is what was compiled: a damaged one could crash the process when it is loaded."""
    try:
        intact = hashlib.sha256(path.read_bytes()).hexdigest() == _digest_file(path).read_text()
        return ctypes.CDLL(str(path)) if intact else None
    except OSError:
        return None


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")
