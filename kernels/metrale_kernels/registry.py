"""Which implementation runs, chosen once at start, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metrale_kernels.errors import KernelUnavailableError
from metrale_kernels.interface import Operations
from metrale_kernels.reference import ReferenceOperations

IMPLEMENTATIONS = ("reference", "cpu")


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen implementation and why it was chosen, for logs and ``doctor``."""

    operations: Operations
    name: str
    reason: str


def select_operations(device: torch.device, requested: str = "auto") -> Selection:
    """``auto`` takes the fastest implementation that can run on ``device``.

    Raises KernelUnavailableError when ``requested`` names another one that cannot.
    """
    if requested not in ("auto", *IMPLEMENTATIONS):
        raise KernelUnavailableError(f"there are no {requested!r} kernels; allowed: auto, {', '.join(IMPLEMENTATIONS)}")
    if requested == "reference":
        return Selection(ReferenceOperations(), "reference", "asked for")
    if device.type != "cpu":
        if requested == "cpu":
            raise KernelUnavailableError(f"the cpu kernels do not run on {device.type}")
        return Selection(ReferenceOperations(), "reference", f"plain torch operations on {device.type}")
    try:
        from metrale_kernels.cpu import load_operations

        return Selection(load_operations(), "cpu", "asked for" if requested == "cpu" else "compiled for this processor")
    except KernelUnavailableError as error:
        if requested == "cpu":
            raise
        return Selection(ReferenceOperations(), "reference", f"no compiled kernels: {error}")
