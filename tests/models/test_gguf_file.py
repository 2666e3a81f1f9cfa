"""The GGUF container: agreement with the library's reader, and every way a file can be broken."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrale_async.errors import CheckpointError, ModelError, UnsupportedModelError
from metrale_async.models.gguf_file import GgufFile
from tests.models.tiny import write_gguf


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(
        tmp_path_factory.mktemp("gguf") / "tiny.gguf",
        **{"some.text": "ünïcödé\n", "some.flag": True, "some.list": ["a", "", "ß" * 300], "some.numbers": [1, -2, 3]},
    )


def test_metadata_and_tensors_equal_those_of_the_library_reader(path: Path) -> None:
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.type, mine.offset, mine.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert ours.tensor_bytes(mine).tobytes() == tensor.data.tobytes()


def header(*entries: bytes, version: int = 3, tensors: int = 0, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, len(entries)) + b"".join(entries)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


BROKEN = {
    "an empty file": (b"", CheckpointError, "empty"),
    "another format": (b"PK\x03\x04" + bytes(100), CheckpointError, "not a GGUF"),
    "version 1": (header(version=1), UnsupportedModelError, "version 1"),
    "big-endian": (header(version=3 << 24), UnsupportedModelError, "little-endian"),
    "more keys than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), CheckpointError, "truncated or corrupt"),
    "more tensors than bytes": (header(tensors=2**60), CheckpointError, "truncated or corrupt"),
    "an unknown value type": (header(entry(b"k", 99, b"")), CheckpointError, "unknown metadata type 99"),
    "a string without end": (
        header(entry(b"k", GGUFValueType.STRING, struct.pack("<Q", 2**40))),
        CheckpointError,
        "truncated or corrupt",
    ),
    "an array without end": (
        header(entry(b"k", GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.INT32, 2**50))),
        CheckpointError,
        "truncated or corrupt",
    ),
    "a list of strings without end": (
        header(entry(b"k", GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.STRING, 1) + struct.pack("<Q", 9))),
        CheckpointError,
        "truncated or corrupt",
    ),
    "an array of arrays": (
        header(entry(b"k", GGUFValueType.ARRAY, struct.pack("<IQ", GGUFValueType.ARRAY, 1) + bytes(16))),
        UnsupportedModelError,
        "arrays of arrays",
    ),
    "broken utf-8": (header(entry(b"k", GGUFValueType.STRING, text(b"\xff\xfe"))), CheckpointError, "corrupt near"),
    "a key twice": (
        header(entry(b"k", GGUFValueType.UINT8, b"\1"), entry(b"k", GGUFValueType.UINT8, b"\2")),
        CheckpointError,
        "'k' twice",
    ),
    "a wrong alignment": (
        header(entry(b"general.alignment", GGUFValueType.UINT32, struct.pack("<I", 24))),
        CheckpointError,
        "power of two",
    ),
    "no dimensions": (header(tensors=1) + tensor(b"t", ()) + bytes(64), CheckpointError, "0 dimensions"),
    "five dimensions": (header(tensors=1) + tensor(b"t", (1,) * 5) + bytes(64), CheckpointError, "5 dimensions"),
    "an empty tensor": (header(tensors=1) + tensor(b"t", (0, 4)) + bytes(64), CheckpointError, "shape"),
    "a tensor beyond belief": (header(tensors=1) + tensor(b"t", (2**40, 2)) + bytes(64), CheckpointError, "shape"),
    "an unknown tensor type": (header(tensors=1) + tensor(b"t", (4,), 999) + bytes(64), UnsupportedModelError, "999"),
    "a row that is no multiple of its block": (
        header(tensors=1) + tensor(b"t", (33,), 2) + bytes(64),
        CheckpointError,
        "multiples of 32",
    ),
    "a tensor twice": (
        header(tensors=2) + tensor(b"t", (1,)) + tensor(b"t", (1,), offset=32) + bytes(128),
        CheckpointError,
        "'t' twice",
    ),
    "a tensor past the end": (
        header(tensors=1) + tensor(b"far", (8,), offset=4096) + bytes(64),
        CheckpointError,
        "'far' ends at byte",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_the_reason(what: str, tmp_path: Path) -> None:
    data, error, reason = BROKEN[what]
    (tmp_path / "broken.gguf").write_bytes(data)
    with pytest.raises(error, match=reason) as raised:
        GgufFile(tmp_path / "broken.gguf")
    assert "broken.gguf" in str(raised.value)


def test_a_file_cut_anywhere_is_refused_with_its_size(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    opened = GgufFile(path)
    end = max(t.offset + t.nbytes for t in opened.tensors.values())
    cuts = [1, 3, 4, 20, 23, 24, 100, opened.header_bytes - 40, opened.header_bytes, end // 2, end - 1]
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=f"{cut}|truncated"):
            GgufFile(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(data[:end])
    GgufFile(tmp_path / "cut.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_bytes_in_the_header_never_end_in_anything_but_a_model_error(
    path: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(path.read_bytes())
    header_bytes = GgufFile(path).header_bytes
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "changed.gguf").write_bytes(content)
    with contextlib.suppress(ModelError):
        GgufFile(tmp_path / "changed.gguf")
