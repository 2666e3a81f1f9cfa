"""The name of a KV block: a hash of all tokens up to its end and of everything else its rows depend on.

Two blocks with one name hold the same rows, whoever computed them: the hash is chained, so a block's name covers its
whole prefix, and the chain starts from the model's digest, the adapter and the request's cache salt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

HASH_BYTES: Final = 16


def root_hash(model_digest: str, adapter: str = "", salt: str = "") -> bytes:
    """Where chains start; chains of different models, adapters or salts never meet."""
    state = hashlib.blake2b(digest_size=HASH_BYTES, person=b"metrale-root")
    for part in (model_digest, adapter, salt):
        data = part.encode()
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Names of all full blocks of ``token_ids``; ``known`` are those of the first blocks, computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root
    data = array("Q", token_ids[len(hashes) * block_size : len(token_ids) // block_size * block_size]).tobytes()
    step = 8 * block_size
    for start in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[start : start + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
