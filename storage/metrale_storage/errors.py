"""Every exception this package raises by itself.

StorageError
├── FileIOError           the operating system's: EIO, a bad descriptor ... (``errno`` tells)
│   └── NoSpaceError      ENOSPC, EDQUOT
├── EndOfFileError        the file ends before the bytes that were asked for
├── RingClosedError       the ring was closed
└── StoreLockedError      another process has the store's folder
"""

from __future__ import annotations

import errno
import os


class StorageError(Exception):
    """Root of the tree."""


class FileIOError(StorageError):
    """An operation on a file failed. ``errno`` is the system's code; offset and length are in bytes."""

    def __init__(self, operation: str, path: str, offset: int, length: int, code: int) -> None:
        super().__init__(f"{operation} of {length} bytes at {offset} of {path}: {os.strerror(code)}")
        self.operation = operation
        self.path = path
        self.offset = offset
        self.length = length
        self.errno = code


class NoSpaceError(FileIOError):
    """The device or the user's quota is full."""


class EndOfFileError(StorageError):
    """A read went past the end of its file."""

    def __init__(self, path: str, offset: int, wanted: int, got: int) -> None:
        super().__init__(f"{path} ends {got} bytes after {offset}; {wanted} were asked for")
        self.path = path
        self.offset = offset


class RingClosedError(StorageError):
    """The ring was closed before or during the operation."""


class StoreLockedError(StorageError):
    """The folder belongs to another running process."""


def file_error(operation: str, path: str, offset: int, length: int, code: int) -> FileIOError:
    """The typed error for a system error code."""
    kind = NoSpaceError if code in (errno.ENOSPC, errno.EDQUOT) else FileIOError
    return kind(operation, path, offset, length, code)
