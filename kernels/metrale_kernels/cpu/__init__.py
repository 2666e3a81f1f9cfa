"""The operations in C, compiled for this processor."""

from metrale_kernels.errors import KernelUnavailableError
from metrale_kernels.interface import Operations


def load_operations() -> Operations:
    raise KernelUnavailableError("not built")


def set_num_threads(count: int) -> None:
    """Threads of the kernels' own pool."""
