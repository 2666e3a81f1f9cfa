"""GGUF container, parsed in one bounded pass: metadata, and where each tensor lies.

The ``gguf`` library's reader keeps a numpy view per string, which takes two seconds for a vocabulary of 49,152 tokens
and walks without limit through a corrupt length; this one takes some 50 ms and checks every length against the file
before it is used. Type numbers, sizes and metadata keys come from that library.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from metrale_async.errors import CheckpointError, UnsupportedModelError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_TENSOR_DIMENSIONS: Final = 4
_MAX_TENSOR_ELEMENTS: Final = 2**40
_SCALARS: Final[Mapping[GGUFValueType, str]] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. ``shape`` is outermost first, as in torch; ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


class GgufFile:
    """An opened ``.gguf`` file: ``metadata`` (scalars, strings, lists) and ``tensors`` by name.

    Raises CheckpointError for a truncated, corrupt or self-contradicting file, with sizes where they tell something;
    UnsupportedModelError for a version or tensor type this reader does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any]
        self.tensors: Mapping[str, GgufTensor]
        try:
            with path.open("rb") as file:
                # A private mapping is writable, which is what torch wants of a buffer; nothing writes to it.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
        cursor = _Cursor(self._data, path.name)
        try:
            self._parse(cursor)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path.name} is corrupt near byte {cursor.offset}: {error}") from error

    def tensor_bytes(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as they lie in the file, a view of the mapping."""
        return np.frombuffer(self._data, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)

    @property
    def header_bytes(self) -> int:
        """Size of everything before the tensors' data."""
        return self._data_start

    def _parse(self, cursor: _Cursor) -> None:
        name = self.path.name
        if cursor.take(4) != _MAGIC:
            raise CheckpointError(f"{name} is not a GGUF file: it does not start with {_MAGIC!r}")
        version = cursor.number("<I")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"{name} is GGUF version {version}; supported: 2, 3 (little-endian)")
        tensor_count, metadata_count = cursor.number("<Q"), cursor.number("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(cursor.count(metadata_count, 12)):
            key = cursor.string()
            if key in metadata:
                raise CheckpointError(f"{name} holds the metadata key {key!r} twice")
            metadata[key] = cursor.value()
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{name}: general.alignment is {alignment!r}; allowed: a power of two")
        headers = [cursor.tensor() for _ in range(cursor.count(tensor_count, 24))]
        self._data_start = -(-cursor.offset // alignment) * alignment
        self.metadata = metadata
        self.tensors = self._placed(headers)

    def _placed(self, headers: list[GgufTensor]) -> Mapping[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for header in headers:
            if header.name in tensors:
                raise CheckpointError(f"{self.path.name} holds the tensor {header.name!r} twice")
            tensors[header.name] = GgufTensor(
                header.name, header.shape, header.type, self._data_start + header.offset, header.nbytes
            )
        if tensors:
            last = max(tensors.values(), key=lambda tensor: tensor.offset + tensor.nbytes)
            needed, size = last.offset + last.nbytes, len(self._data)
            if needed > size:
                raise CheckpointError(
                    f"{self.path.name} is truncated: it has {size} bytes, tensor {last.name!r} ends at byte {needed}"
                )
        return tensors


class _Cursor:
    """Reads forward through the header; every length is checked against the bytes that are left."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.offset = 0
        self._data = data
        self._file = file
        self._size = len(data)

    def take(self, nbytes: int) -> bytes:
        end = self.offset + nbytes
        if end > self._size:
            raise CheckpointError(
                f"{self._file} is truncated: it has {self._size} bytes, its header goes on to byte {end} at least"
            )
        taken = self._data[self.offset : end]
        self.offset = end
        return taken

    def count(self, number: int, entry_bytes: int) -> int:
        """``number``, if so many entries of at least ``entry_bytes`` can lie in the rest of the file."""
        if number * entry_bytes > self._size - self.offset:
            raise CheckpointError(
                f"{self._file} is truncated or corrupt: {number} entries from byte {self.offset} of {self._size} on"
            )
        return number

    def number(self, code: str) -> int:
        value: int = struct.unpack(code, self.take(struct.calcsize(code)))[0]
        return value

    def string(self) -> str:
        return self.take(self.count(self.number("<Q"), 1)).decode("utf-8")

    def value(self) -> Any:
        kind = self._value_type()
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(kind)
        item, length = self._value_type(), self.number("<Q")
        if item is GGUFValueType.ARRAY:
            raise UnsupportedModelError(f"{self._file}: metadata arrays of arrays are not supported")
        if item is GGUFValueType.STRING:
            return self._strings(self.count(length, 8))
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(self.take(self.count(length, dtype.itemsize) * dtype.itemsize), dtype).tolist()

    def tensor(self) -> GgufTensor:
        """One entry of the tensor table; ``offset`` still counts from the start of the data."""
        name = self.string()
        dimensions = self.number("<I")
        if not 1 <= dimensions <= _MAX_TENSOR_DIMENSIONS:
            raise CheckpointError(f"{self._file}: tensor {name!r} has {dimensions} dimensions; allowed: 1 to 4")
        shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))))
        type_number, offset = self.number("<I"), self.number("<Q")
        try:
            kind = GGMLQuantizationType(type_number)
        except ValueError as error:
            raise UnsupportedModelError(f"{self._file}: tensor {name!r} has the unknown type {type_number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = math.prod(shape)
        if not 0 < elements <= _MAX_TENSOR_ELEMENTS or shape[-1] % block:
            raise CheckpointError(
                f"{self._file}: tensor {name!r} of type {kind.name} has the shape {list(shape)}; "
                f"rows must be multiples of {block}"
            )
        return GgufTensor(name, shape, kind, offset, elements // block * block_bytes)

    def _value_type(self) -> GGUFValueType:
        number = self.number("<I")
        try:
            return GGUFValueType(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self._file} is corrupt: unknown metadata type {number} near byte {self.offset}"
            ) from error

    def _scalar(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def _strings(self, length: int) -> list[str]:
        # The loop over a vocabulary: kept free of method calls, it is most of the time of opening a file.
        data, size, offset = self._data, self._size, self.offset
        unpack = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            start = offset + 8
            if start > size or (end := start + unpack(data, offset)[0]) > size:
                raise CheckpointError(f"{self._file} is truncated or corrupt: a string at byte {offset} of {size}")
            strings.append(data[start:end].decode("utf-8"))
            offset = end
        self.offset = offset
        return strings
