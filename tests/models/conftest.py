"""The plain operations: what these tests look at does not depend on how fast they are."""

from __future__ import annotations

import pytest
import torch
from metrale_kernels import select_operations
from metrale_kernels.interface import Operations


@pytest.fixture(scope="session")
def operations() -> Operations:
    return select_operations(torch.device("cpu"), "reference").operations
