"""Wheel and sdist hold what they should, and the packages of the wheel work away from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGES = {"metrale_async": ROOT, "metrale_kernels": ROOT / "kernels", "metrale_storage": ROOT / "storage"}
SHIPPED = {".py", ".c", ".h", ".typed", ".html", ".css", ".js", ".svg"}


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist), built without network from a copy of the tree that holds tracked kinds of files only."""
    folder = tmp_path_factory.mktemp("distribution")
    tree = folder / "tree"
    for package, root in PACKAGES.items():
        for file in source_files(root / package):
            copy(file, tree / file.relative_to(ROOT))
    for name in ("pyproject.toml", "README.md", "LICENSE-MIT", "LICENSE-APACHE"):
        copy(ROOT / name, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", tree, cwd=folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return wheel, sdist


def source_files(package: Path) -> list[Path]:
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix in SHIPPED)
    return sorted(path for path in files if "__pycache__" not in path.parts)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())


def test_the_wheel_holds_every_source_file_of_the_three_packages(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    expected = {
        str(file.relative_to(root)) for package, root in PACKAGES.items() for file in source_files(root / package)
    }
    assert expected <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_both_licences_are_in_wheel_and_sdist(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel, tarfile.open(built[1]) as sdist:
        for names in (wheel.namelist(), sdist.getnames()):
            assert {"LICENSE-MIT", "LICENSE-APACHE"} <= {name.rpartition("/")[2] for name in names}


def test_the_sdist_holds_every_source_file(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {
        str(file.relative_to(ROOT)) for package, root in PACKAGES.items() for file in source_files(root / package)
    }
    assert expected <= names


def test_the_installed_wheel_runs_away_from_the_source_tree(built: tuple[Path, Path], tmp_path: Path) -> None:
    # pip can be told not to look at an index, so the dependencies come from this environment.
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, built[0]]
    run(*pip, cwd=tmp_path)
    prelude = f"import sys; sys.path.insert(0, {str(target)!r})\n"
    where = (
        "import metrale_async, metrale_kernels.interface, metrale_storage\n"
        "from metrale_async import AsyncEngine\n"
        "for package in (metrale_async, metrale_kernels, metrale_storage): print(*package.__path__)"
    )
    folders = run(sys.executable, "-I", "-c", prelude + where, cwd=tmp_path).split()
    assert folders == [str(target / package) for package in PACKAGES]
    ask = "from metrale_async.cli import main\nmain(['--version'])"
    version = run(sys.executable, "-I", "-c", prelude + ask, cwd=tmp_path).strip()
    assert version == f"metrale-async {built[0].name.split('-')[1]}"
    assert (target / "bin" / "metrale-async").is_file()
