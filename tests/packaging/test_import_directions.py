"""Arrows of the design point downwards only.

api -> engine -> {cache, speculative, parallel, execution} -> models -> kernels; ``startup`` wires.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

SHARED = {"errors", "arguments"}
"""Modules at the top of metrale_async that every package of it may import."""
BELOW_ENGINE = {"cache", "speculative", "parallel", "execution"}

ALLOWED: Mapping[str, set[str]] = {
    "errors": set(),
    "arguments": set(),
    "logging_setup": set(),
    "text": SHARED,
    "models": SHARED,
    **{package: SHARED | {"models"} for package in BELOW_ENGINE},
    "engine": SHARED | BELOW_ENGINE | {"models", "text"},
    "api": SHARED | BELOW_ENGINE | {"engine", "models", "text"},
    "startup": SHARED | BELOW_ENGINE | {"engine", "models", "text"},
    "cli": SHARED | BELOW_ENGINE | {"api", "engine", "models", "startup", "text", "logging_setup", "__version__"},
    "__init__": SHARED | BELOW_ENGINE | {"engine", "models", "startup", "text"},
    "__main__": {"cli"},
}
"""What each part of metrale_async may import of it, beside itself. A part that is not listed may not exist."""

EMBEDDING_ENTRY = ("metrale_async.engine.async_engine", "startup")
"""The one arrow upwards: an embedding program constructs AsyncEngine and nothing else, so that must load a model."""

KERNELS_MAY_BE_IMPORTED_BY = BELOW_ENGINE | {"models", "engine", "startup", "cli", "__init__"}
STORAGE_MAY_BE_IMPORTED_BY = BELOW_ENGINE | {"engine", "startup", "cli", "__init__"}


def imported_modules(source: str, package: str) -> Iterator[str]:
    """The absolute name of every module that ``source``, a module of ``package``, imports at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from metrale_async import engine` may import a module: both readings are looked at.
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def forbidden_imports(importer: str, source: str) -> list[str]:
    """One sentence for every import in the module ``importer`` (a dotted name) that points upwards."""
    top, _, rest = importer.partition(".")
    part = rest.partition(".")[0] or "__init__"
    package = importer.rpartition(".")[0] if rest and not importer.endswith("__init__") else importer
    package = package.removesuffix(".__init__")
    found = []
    for target in imported_modules(source, package):
        target_top, _, target_rest = target.partition(".")
        target_part = target_rest.partition(".")[0]
        if top in ("metrale_kernels", "metrale_storage"):
            wrong = target_top in {"metrale_async", "metrale_kernels", "metrale_storage"} - {top}
        elif target_top == "metrale_kernels":
            wrong = part not in KERNELS_MAY_BE_IMPORTED_BY
        elif target_top == "metrale_storage":
            wrong = part not in STORAGE_MAY_BE_IMPORTED_BY
        elif target_top == "metrale_async":
            # Names that are no part are public names of metrale_async itself: they are for users, not for parts.
            allowed = target_part == part or target_part in ALLOWED[part]
            wrong = not allowed and (importer, target_part) != EMBEDDING_ENTRY
        else:
            wrong = False
        if wrong:
            found.append(f"{importer} imports {target}")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for root, top in (
        (ROOT, "metrale_async"),
        (ROOT / "kernels", "metrale_kernels"),
        (ROOT / "storage", "metrale_storage"),
    ):
        for path in sorted((root / top).rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts), path


def test_every_part_of_the_engine_has_a_place_in_the_design() -> None:
    parts = {name.split(".")[1] for name, _ in modules() if name.startswith("metrale_async.")}
    assert parts <= ALLOWED.keys(), "a new part needs a line in ALLOWED"


def test_no_import_points_upwards() -> None:
    found = [sentence for name, path in modules() for sentence in forbidden_imports(name, path.read_text("utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("metrale_storage.ring", "import metrale_async"),
        ("metrale_storage.ring", "from metrale_kernels import registry"),
        ("metrale_kernels.cpu.linear", "def f():\n    from metrale_async.errors import StepError"),
        ("metrale_async.models.llama", "from metrale_async.engine import AsyncEngine"),
        ("metrale_async.models.llama", "from ..engine.sampling_params import SamplingParams"),
        ("metrale_async.models.llama", "from .. import engine"),
        ("metrale_async.models", "from metrale_async import cache"),
        ("metrale_async.cache.block_pool", "from metrale_async.execution.plan import StepPlan"),
        ("metrale_async.execution.runner", "import metrale_async.engine.scheduler as s"),
        ("metrale_async.engine.step_loop", "from metrale_async.startup import load_engine_parts"),
        ("metrale_async.engine.engine", "if TYPE_CHECKING:\n    from metrale_async.api import app"),
        ("metrale_async.api.app", "from metrale_async.startup import build"),
        ("metrale_async.api.app", "from metrale_async import AsyncEngine"),
        ("metrale_async.api.app", "import metrale_kernels"),
        ("metrale_async.errors", "from metrale_async.arguments import flag_name"),
        ("metrale_async.text.tokenizer", "from metrale_async.models import gguf"),
        ("metrale_async.engine.__init__", "from ..cli import main"),
    ],
)
def test_an_import_that_points_upwards_is_found(importer: str, source: str) -> None:
    assert forbidden_imports(importer, source)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        (
            "metrale_storage.ring",
            "import asyncio, liburing\nfrom metrale_storage.buffers import Arena\nfrom . import errors",
        ),
        ("metrale_kernels.registry", "from metrale_kernels.interface import Operations"),
        (
            "metrale_async.models.llama",
            "from metrale_kernels.interface import Operations\nfrom ..errors import ModelError",
        ),
        (
            "metrale_async.engine.engine",
            "from metrale_async.execution import Executor\nfrom metrale_async.text import x",
        ),
        ("metrale_async.engine.__init__", "from .engine import AsyncEngine\nfrom ..cache import BlockPool"),
        ("metrale_async.api.app", "from metrale_async.engine import AsyncEngine"),
        ("metrale_async.engine.async_engine", "from metrale_async.startup import load_engine_parts"),
        ("metrale_async.__main__", "from metrale_async.cli import main"),
        ("metrale_async.__init__", "from metrale_async.engine import AsyncEngine"),
        ("metrale_async.cli.serve", "from metrale_async.startup import build\nimport metrale_kernels"),
    ],
)
def test_an_import_that_points_downwards_is_allowed(importer: str, source: str) -> None:
    assert forbidden_imports(importer, source) == []
