"""Operations on tensors: one signature each, several implementations. Knows nothing of requests; imports torch only."""

from metrale_kernels.errors import KernelUnavailableError
from metrale_kernels.interface import Operations, PackedLinear, RaggedBatch
from metrale_kernels.registry import IMPLEMENTATIONS, Selection, select_operations

__all__ = [
    "IMPLEMENTATIONS",
    "KernelUnavailableError",
    "Operations",
    "PackedLinear",
    "RaggedBatch",
    "Selection",
    "select_operations",
]
