"""Weights of a Hugging Face directory: one safetensors file, or the shards its index names, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from metrale_async.errors import CheckpointError, UnsupportedModelError
from metrale_async.models.weights import TensorEntry

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_JSON_BYTES: Final = 256 * 2**20
_DTYPE_BYTES: Final[Mapping[str, int]] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsWeights:
    """A WeightSource over every tensor of the checkpoint in ``directory``; reads headers only until ``read``."""

    def __init__(self, directory: Path) -> None:
        self.files: list[Path] = []
        """The files the weights lie in, in order of name."""
        self._handles: dict[str, Any] = {}
        self._entries: dict[str, TensorEntry] = {}
        if (directory / SINGLE_FILE).is_file():
            self._open(directory / SINGLE_FILE)
        elif (directory / INDEX_FILE).is_file():
            self._open_shards(directory, _read_index(directory / INDEX_FILE))
        else:
            pickles = sorted(path.name for path in directory.glob("*.bin")) + sorted(
                path.name for path in directory.glob("*.pt*")
            )
            if pickles:
                raise UnsupportedModelError(
                    f"{directory} holds pickled weights ({pickles[0]}), which can run code when read and are never "
                    "loaded; convert the checkpoint to safetensors"
                )
            raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._entries

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        return self._read(name, dtype, lambda handle: handle.get_tensor(name))

    def read_rows(self, name: str, matrix: int, rows: slice, dtype: torch.dtype) -> Tensor:
        """Some rows of one matrix of a stack [matrices, rows, columns], without reading the others."""
        return self._read(name, dtype, lambda handle: handle.get_slice(name)[matrix, rows])

    def _read(self, name: str, dtype: torch.dtype, get: Callable[[Any], Tensor]) -> Tensor:
        entry = self._entries[name]
        if entry.dtype_name not in _DTYPE_BYTES:
            raise CheckpointError(
                f"tensor {name} in {entry.file} has the type {entry.dtype_name}; allowed: {', '.join(_DTYPE_BYTES)}"
            )
        try:
            stored = get(self._handles[entry.file])
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name} in {entry.file} cannot be read: {error}") from error
        # A copy even where the type fits: weights must not change under a server when the file on disk does.
        return stored.to(dtype, copy=True, memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._handles.clear()

    def _open(self, path: Path) -> None:
        try:
            size = path.stat().st_size
            handle: Any = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            described = f" ({size} bytes)" if path.is_file() else ""
            raise CheckpointError(f"{path.name}{described} is not a whole safetensors file: {error}") from error
        self.files.append(path)
        self._handles[path.name] = handle
        for name in handle.keys():  # noqa: SIM118  (a handle is not iterable)
            if name in self._entries:
                raise CheckpointError(f"tensor {name} lies in both {self._entries[name].file} and {path.name}")
            view = handle.get_slice(name)
            shape, dtype_name = tuple(view.get_shape()), str(view.get_dtype())
            count = 1
            for extent in shape:
                count *= extent
            self._entries[name] = TensorEntry(
                shape, dtype_name, count * _DTYPE_BYTES.get(dtype_name, 1), path.name, name
            )

    def _open_shards(self, directory: Path, index: Mapping[str, str]) -> None:
        for file in sorted(set(index.values())):
            if not (directory / file).is_file():
                raise CheckpointError(f"{INDEX_FILE} names {file}, which is not in {directory}")
            self._open(directory / file)
        for name, file in index.items():
            entry = self._entries.get(name)
            if entry is None or entry.file != file:
                raise CheckpointError(f"{INDEX_FILE} places tensor {name} in {file}, but it is not there")
        unlisted = [entry for name, entry in self._entries.items() if name not in index]
        if unlisted:
            raise CheckpointError(
                f"{unlisted[0].file} holds tensor {unlisted[0].name_in_file}, unknown to {INDEX_FILE}"
            )


def _read_index(path: Path) -> Mapping[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path.name} has no weight_map")
    for name, file in weight_map.items():
        # A file name alone: an index must not reach outside its own directory.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path.name} places tensor {name} in {file!r}; allowed: a file name")
    return weight_map


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file that must hold an object; raises CheckpointError naming the file."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path.name} is {size} bytes long; allowed: up to {MAX_JSON_BYTES}")
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds no JSON object")
    return value
