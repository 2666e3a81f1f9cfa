"""What the decoder reads its tensors through: a source of named tensors, checked as a whole before any is read.

Names are those of Hugging Face checkpoints whatever the file format (``model.layers.0.self_attn.q_proj.weight``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from metrale_kernels.interface import ExpertWeights, Operations, PackedExperts, PackedLinear
from torch import Tensor

from metrale_async.errors import CheckpointError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) as weights are read, from the loading thread."""

_NAMES_SHOWN: Final = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a checkpoint, as its header describes it."""

    shape: tuple[int, ...]
    dtype_name: str
    """The format's own name: ``F32``, ``BF16``, ``Q4_K`` ..."""
    nbytes: int
    """Bytes it takes in the file."""
    file: str
    """Name of the file it lies in, for messages."""
    name_in_file: str


class WeightSource(Protocol):
    """An opened checkpoint."""

    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A fresh contiguous CPU tensor in ``dtype``; raises CheckpointError naming tensor and file."""
        ...

    def close(self) -> None: ...


def natural_dtype(source: WeightSource) -> torch.dtype:
    """The type a checkpoint is computed in under ``--dtype auto``: that of most of its bytes.

    float32 (and float64) stays float32; 16-bit and quantised weights become bfloat16, whose range holds both.
    """
    wide = sum(entry.nbytes for entry in source.tensors.values() if entry.dtype_name in ("F32", "F64"))
    total = sum(entry.nbytes for entry in source.tensors.values())
    return torch.float32 if 2 * wide > total else torch.bfloat16


def check_tensors(
    expected: Mapping[str, tuple[int, ...]], source: WeightSource, ignorable: Callable[[str], bool]
) -> None:
    """Raise CheckpointError unless ``source`` holds exactly ``expected``, by name and shape, plus ignorable tensors."""
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        files = ", ".join(sorted({entry.file for entry in source.tensors.values()})) or "an empty checkpoint"
        raise CheckpointError(f"missing from {files}: {_some(missing)}")
    unused = [name for name in source.tensors if name not in expected and not ignorable(name)]
    if unused:
        where = source.tensors[unused[0]].file
        shown = [source.tensors[name].name_in_file for name in unused]
        raise CheckpointError(f"{where} holds tensors this model type has no use for: {_some(shown)}")
    wrong = [
        f"{entry.name_in_file} in {entry.file} is {list(entry.shape)}, the config asks for {list(shape)}"
        for name, shape in expected.items()
        if (entry := source.tensors[name]).shape != shape
    ]
    if wrong:
        raise CheckpointError("wrong shape: " + "; ".join(wrong[:_NAMES_SHOWN]))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


class WeightReader:
    """Reads each expected tensor once, in the model's dtype and on its device, and reports progress."""

    def __init__(
        self,
        source: WeightSource,
        expected: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        progress: Progress | None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.weight_bytes = 0
        """Bytes the weights handed out so far take in memory."""
        self._source = source
        self._unread = dict.fromkeys(expected)
        self._operations = operations
        self._progress = progress
        self._done_bytes = 0
        self._total_bytes = sum(source.tensors[name].nbytes for name in expected)

    def tensor(self, name: str) -> Tensor:
        """One tensor, held by the caller."""
        tensor = self._read(name)
        self.weight_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str, *, zero_centred: bool) -> Tensor:
        """A norm's weight [D]; a zero-centred one is stored less 1, and the sum is only exact in float32."""
        return self.constant(name).add_(1.0) if zero_centred else self.tensor(name)

    def take(self, name: str) -> Tensor:
        """One tensor that the caller makes something else of; what comes of it is counted where it is packed."""
        return self._read(name)

    def constant(self, name: str) -> Tensor:
        """A small tensor in float32 whatever the model's dtype; the checkpoint may store it more exactly than that."""
        tensor = self._read(name, torch.float32)
        self.weight_bytes += tensor.nbytes
        return tensor

    def linear(self, *modules: str, bias: bool) -> PackedLinear:
        """``<module>.weight`` (and ``.bias``) of several modules fused into one layer, outputs in the order given."""
        weights = [self._read(f"{module}.weight") for module in modules]
        biases = [self._read(f"{module}.bias") if bias else None for module in modules]
        return self.pack(weights, biases)

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> PackedLinear:
        """Pack tensors that were read already."""
        packed = self._operations.pack_linear(weights, biases)
        self.weight_bytes += packed.nbytes
        return packed

    def experts(self, prefix: str, count: int) -> PackedExperts:
        """``<prefix>.<id>.gate_proj``, ``up_proj`` and ``down_proj`` of experts 0 to ``count`` - 1, one by one."""
        modules = ("gate_proj", "up_proj", "down_proj")
        weights = (
            ExpertWeights(*(self._read(f"{prefix}.{index}.{module}.weight") for module in modules))
            for index in range(count)
        )
        packed = self._operations.pack_experts(weights, count)
        self.weight_bytes += packed.nbytes
        return packed

    def finish(self) -> None:
        """Every expected tensor must have been used by now: a name that is checked for and never read is a bug."""
        if self._unread:
            raise CheckpointError(f"tensors were checked but not loaded: {_some(list(self._unread))}")

    def _read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        del self._unread[name]
        tensor = self._source.read(name, dtype or self.dtype).to(self.device)
        self._done_bytes += self._source.tensors[name].nbytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)
        return tensor
