"""Asynchronous disk I/O and a crash-safe store of blocks, usable alone: an io_uring ring for asyncio (threads where
there is none), aligned buffers, a block store. Knows nothing of models or HTTP."""

from metrale_storage.block_store import BlockStore, BlockStoreStatistics
from metrale_storage.buffers import ALIGNMENT, BufferLease, BufferPool, aligned
from metrale_storage.errors import (
    EndOfFileError,
    FileIOError,
    NoSpaceError,
    RingClosedError,
    StorageError,
    StoreLockedError,
)
from metrale_storage.ring import File, Ring, RingStatistics, open_file

__all__ = [
    "ALIGNMENT",
    "BlockStore",
    "BlockStoreStatistics",
    "BufferLease",
    "BufferPool",
    "EndOfFileError",
    "File",
    "FileIOError",
    "NoSpaceError",
    "Ring",
    "RingClosedError",
    "RingStatistics",
    "StorageError",
    "StoreLockedError",
    "aligned",
    "open_file",
]
