"""Operations under test, and tiny checkpoints written once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from metrale_kernels import select_operations
from metrale_kernels.errors import KernelUnavailableError
from metrale_kernels.interface import Operations
from transformers import PreTrainedModel

from metrale_async.models import CausalLanguageModel, load_model, resolve_model
from tests.parity.checkpoints import Variant, build, save


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="session", params=["reference", "cpu"])
def operations(request: pytest.FixtureRequest) -> Operations:
    """Each implementation that runs on this machine's CPU."""
    try:
        return select_operations(torch.device("cpu"), request.param).operations
    except KernelUnavailableError as error:
        pytest.skip(f"no {request.param} kernels here: {error}")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Variant], tuple[PreTrainedModel, Path]]:
    """The ``transformers`` model of a variant and the directory it was saved to."""
    made: dict[str, tuple[PreTrainedModel, Path]] = {}

    def make(variant: Variant) -> tuple[PreTrainedModel, Path]:
        if str(variant) not in made:
            model = build(variant)
            made[str(variant)] = model, save(model, tmp_path_factory.mktemp(str(variant)))
        return made[str(variant)]

    return make


@pytest.fixture(scope="session")
def load(operations: Operations) -> Callable[[Path], CausalLanguageModel]:
    """Load a directory or file in float32."""

    def load(path: Path) -> CausalLanguageModel:
        source = resolve_model(str(path))
        return load_model(source, device=torch.device("cpu"), dtype="float32", operations=operations).model

    return load
