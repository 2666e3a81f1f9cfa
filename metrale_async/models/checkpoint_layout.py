"""Names of a Hugging Face checkpoint as the decoder knows them, where a checkpoint says the same thing otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from metrale_async.errors import CheckpointError
from metrale_async.models.safetensors_weights import SafetensorsWeights
from metrale_async.models.weights import TensorEntry

_STACKED_EXPERTS: Final = re.compile(r"(model\.layers\.\d{1,6}\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class _Part:
    """What of a stored tensor one name stands for: all of it, or some rows of one matrix of a stack."""

    stored: str
    matrix: int | None = None
    rows: tuple[int, int] = (0, 0)


class LanguageModelWeights:
    """A WeightSource over the language model of a checkpoint.

    ``text_prefix`` at the start of a name becomes ``model.``. Experts that are stored stacked (``experts.gate_up_proj``
    [experts, 2 * intermediate, hidden] and ``experts.down_proj`` [experts, hidden, intermediate]) appear one by one.
    """

    def __init__(self, stored: SafetensorsWeights, text_prefix: str | None) -> None:
        self._stored = stored
        self._parts: dict[str, _Part] = {}
        self._entries: dict[str, TensorEntry] = {}
        for stored_name, entry in stored.tensors.items():
            name = stored_name
            if text_prefix is not None and stored_name.startswith(text_prefix):
                name = f"model.{stored_name.removeprefix(text_prefix)}"
            for part_name, part, part_entry in _parts(name, stored_name, entry):
                if part_name in self._parts:
                    other = self._parts[part_name].stored
                    raise CheckpointError(f"{entry.file}: {stored_name} and {other} are both {part_name}")
                self._parts[part_name] = part
                self._entries[part_name] = part_entry

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._entries

    @property
    def files(self) -> list[Path]:
        """The files the weights lie in, in order of name."""
        return self._stored.files

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        part = self._parts[name]
        if part.matrix is None:
            return self._stored.read(part.stored, dtype)
        return self._stored.read_rows(part.stored, part.matrix, slice(*part.rows), dtype)

    def close(self) -> None:
        self._stored.close()


def _parts(name: str, stored: str, entry: TensorEntry) -> Iterator[tuple[str, _Part, TensorEntry]]:
    found = _STACKED_EXPERTS.fullmatch(name)
    if found is None:
        yield name, _Part(stored), entry
        return
    prefix, kind = found.groups()
    if len(entry.shape) != 3 or (kind == "gate_up_proj" and entry.shape[1] % 2):
        raise CheckpointError(f"{stored} in {entry.file} is {list(entry.shape)}; allowed: a stack of matrices")
    experts, rows, columns = entry.shape
    modules = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    height = rows // len(modules)
    for expert in range(experts):
        for index, module in enumerate(modules):
            yield (
                f"{prefix}.{expert}.{module}.weight",
                _Part(stored, expert, (index * height, (index + 1) * height)),
                replace(entry, shape=(height, columns), nbytes=entry.nbytes // experts // len(modules)),
            )
