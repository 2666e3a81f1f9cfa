"""The header in front of every record: what it is, how long, and checksums of both.

A record is believed only if its header says exactly what was asked for and both checksums are right, so bytes of
another record, of an older one in the same place, or torn and flipped ones are never taken for it.

Layout (little-endian), in a block of 4096 bytes of its own so that the payload stays aligned:
    8s magic, I version, 16s fingerprint of the store, 32s key (zero-padded), I key length, Q payload length,
    16s XXH3-128 of the payload, 8s XXH3-64 of everything before
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from metrale_storage.buffers import ALIGNMENT

MAGIC: Final = b"MTRLREC\n"
VERSION: Final = 1
HEADER_BYTES: Final = ALIGNMENT
MAX_KEY_BYTES: Final = 32
_FIELDS: Final = struct.Struct("<8sI16s32sIQ16s")


def write_header(into: memoryview, fingerprint: bytes, key: bytes, payload: memoryview) -> None:
    """Fill the header block for ``payload``."""
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        fingerprint,
        key.ljust(MAX_KEY_BYTES, b"\0"),
        len(key),
        len(payload),
        xxhash.xxh3_128_digest(payload),
    )
    into[: len(fields)] = fields
    into[len(fields) : len(fields) + 8] = xxhash.xxh3_64_digest(fields)


def payload_matches(header: memoryview, fingerprint: bytes, key: bytes, payload: memoryview) -> bool:
    """Whether header and payload are, without any doubt, the record ``key`` of this store."""
    fields = bytes(header[: _FIELDS.size])
    if bytes(header[_FIELDS.size : _FIELDS.size + 8]) != xxhash.xxh3_64_digest(fields):
        return False
    magic, version, owner, padded_key, key_length, length, checksum = _FIELDS.unpack(fields)
    return (
        (magic, version, owner) == (MAGIC, VERSION, fingerprint)
        and padded_key == key.ljust(MAX_KEY_BYTES, b"\0")
        and key_length == len(key)
        and length == len(payload)
        and bool(checksum == xxhash.xxh3_128_digest(payload))
    )
