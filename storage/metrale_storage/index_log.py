"""Which record lies in which slot: an append-only log of 64-byte entries, each with its own checksum.

The log is a hint for finding records, never a proof: a record proves itself (record.py). So an entry that is lost,
torn or flipped costs at most the records it speaks of. It is written anew, atomically, when most of it is outdated.

Entry (little-endian): 4s magic, B kind (1 put, 2 delete), B key length, 2x, 32s key, I slot, I payload bytes, 8x, 8s
XXH3-64.
"""

from __future__ import annotations

import os
import struct
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import xxhash

ENTRY_BYTES: Final = 64
REWRITE_FACTOR: Final = 4
"""The log is written anew on opening when it is this many times as long as needed."""
_MAGIC: Final = b"MIX1"
_PUT, _DELETE = 1, 2
_FIELDS: Final = struct.Struct("<4sBB2x32sII8x")

Index = OrderedDict[bytes, tuple[int, int]]
"""Key -> (slot, payload bytes), least recently used first."""


def put_entry(key: bytes, slot: int, nbytes: int) -> bytes:
    return _entry(_PUT, key, slot, nbytes)


def delete_entry(key: bytes) -> bytes:
    return _entry(_DELETE, key, 0, 0)


def read_index(path: Path, num_slots: int) -> tuple[Index, int, int]:
    """The index a log describes, its whole entries, and those that were damaged. A missing log is an empty one.

    Of two entries for one slot the later one holds: what lay there before was overwritten.
    """
    index: Index = OrderedDict()
    owners: dict[int, bytes] = {}
    damaged = 0
    data = path.read_bytes() if path.is_file() else b""
    for start in range(0, len(data) // ENTRY_BYTES * ENTRY_BYTES, ENTRY_BYTES):
        entry = data[start : start + ENTRY_BYTES]
        if xxhash.xxh3_64_digest(entry[: _FIELDS.size]) != entry[_FIELDS.size :]:
            damaged += 1
            continue
        magic, kind, key_length, padded_key, slot, nbytes = _FIELDS.unpack(entry[: _FIELDS.size])
        if magic != _MAGIC or slot >= num_slots:
            damaged += 1
            continue
        key = padded_key[:key_length]
        previous = index.pop(key, None)
        if previous is not None:
            owners.pop(previous[0], None)
        if kind == _PUT:
            overwritten = owners.pop(slot, None)
            if overwritten is not None:
                index.pop(overwritten, None)
            index[key] = (slot, nbytes)
            owners[slot] = key
    return index, len(data) // ENTRY_BYTES, damaged


def rewrite(path: Path, index: Index) -> None:
    """Replace the log by one that says just what ``index`` holds."""
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, (put_entry(key, slot, nbytes) for key, (slot, nbytes) in index.items()))
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _write_all(descriptor: int, entries: Iterable[bytes]) -> None:
    data = memoryview(b"".join(entries))
    while data:
        data = data[os.write(descriptor, data) :]


def _entry(kind: int, key: bytes, slot: int, nbytes: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, kind, len(key), key, slot, nbytes)
    return fields + xxhash.xxh3_64_digest(fields)
