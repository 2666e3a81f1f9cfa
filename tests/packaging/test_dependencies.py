"""What the packages import is declared, what is declared is imported, pinned, and explained in README."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
OWN = {"metrale_async", "metrale_kernels", "metrale_storage"}
OPTIONAL = {"triton"}
"""Imported only where an extra brings it."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {normalized(re.match(r"[\w.-]+", requirement).group()) for requirement in project["dependencies"]}  # type: ignore[union-attr]


def imported() -> Iterator[tuple[str, Path]]:
    for package in (ROOT / "metrale_async", ROOT / "kernels" / "metrale_kernels", ROOT / "storage" / "metrale_storage"):
        for path in package.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Import):
                    yield from ((alias.name.partition(".")[0], path) for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield node.module.partition(".")[0], path


def test_every_imported_library_is_a_declared_dependency() -> None:
    allowed = declared() | OPTIONAL | OWN
    strangers = {
        f"{path.relative_to(ROOT)} imports {module}"
        for module, path in imported()
        if module not in sys.stdlib_module_names and module not in OWN and normalized(module) not in allowed
    }
    assert not strangers


def test_every_declared_dependency_is_imported() -> None:
    assert declared() <= {normalized(module) for module, _ in imported()}


def test_every_declared_dependency_is_pinned() -> None:
    pins = re.findall(r"^([\w.-]+)==\S+", (ROOT / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    assert declared() <= {normalized(pin) for pin in pins}


def test_readme_explains_exactly_the_declared_dependencies() -> None:
    text = (ROOT / "README.md").read_text("utf-8").partition("| dependency | what for |")[2].partition("\n\n")[0]
    explained = re.findall(r"^\| (\w[\w.-]*) \| .+ \|$", text, re.MULTILINE)
    assert sorted(map(normalized, explained)) == sorted(declared())
