"""A fingerprint of a model, for everything that must never mix two of them: caches on disk, ranks, peers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from metrale_async.errors import CheckpointError
from metrale_async.models.config import ModelConfig

_HEAD_BYTES: Final = 4 * 2**20
_TAIL_BYTES: Final = 2**20
_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096
_WHOLE_FILE_BYTES: Final = 16 * 2**20


def model_digest(config: ModelConfig, dtype: torch.dtype, files: Sequence[Path]) -> str:
    """64 hex digits: SHA-256 over the configuration, the compute type and the weight files' contents.

    Names and places of files do not enter. Files up to 16 MiB enter whole, larger ones by size, their first 4 MiB
    (which hold the header), their last 1 MiB and 256 evenly spaced pages in between: that tells apart any two
    checkpoints that were trained, converted or quantised differently, at a cost that does not grow with the file. A
    file of which only single weights between the pages were patched by hand is not told apart.
    """
    digest = hashlib.sha256(f"{config!r}\n{dtype}\n".encode())
    for path in files:
        try:
            _add_file(digest, path)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest.update(f"{size}\n".encode())
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        digest.update(file.read(_HEAD_BYTES))
        middle = size - _HEAD_BYTES - _TAIL_BYTES - _SAMPLE_BYTES
        for sample in range(_SAMPLES):
            file.seek(_HEAD_BYTES + middle * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(size - _TAIL_BYTES)
        digest.update(file.read())
