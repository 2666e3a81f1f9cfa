"""Records of up to one size, by key, in one large file: never a file per record.

The folder holds ``records`` (slots of one size: a header block and a payload, see record.py), ``index`` (index_log.py)
and ``lock``. Slots of one size need no compaction, and evicting the least recently used record frees exactly the room
the next one takes. A record is published when its bytes and then its index entry are written; a process that dies in
between loses that record only. Opening reads the index alone, so its time does not grow with the bytes stored.

Any doubt is a miss: what is read is returned only if it proves to be the record that was asked for. A record that
fails that test is forgotten and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from metrale_storage import index_log
from metrale_storage.buffers import ALIGNMENT, BufferPool, aligned
from metrale_storage.errors import EndOfFileError, FileIOError, StoreLockedError
from metrale_storage.record import HEADER_BYTES, MAX_KEY_BYTES, payload_matches, write_header
from metrale_storage.ring import FILE_MODE, File, Ring, open_file

MAX_SLOTS: Final = 2**31
FINGERPRINT_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class BlockStoreStatistics:
    """Gauges, and totals since the store was opened."""

    records: int
    capacity_records: int
    record_bytes: int
    hits_total: int
    misses_total: int
    rejected_total: int
    """Reads that brought something else than the record: counted as misses too."""
    failed_reads_total: int
    failed_writes_total: int
    evicted_total: int
    damaged_index_entries: int
    """Entries of the index that were unreadable when the store was opened."""


class BlockStore:
    """Made by :meth:`open`. Coroutines may run side by side; any of them may be cancelled at any time."""

    def __init__(
        self,
        folder: Path,
        ring: Ring,
        records: File,
        index_descriptor: int,
        lock_descriptor: int,
        *,
        fingerprint: bytes,
        record_bytes: int,
        capacity: int,
        index: index_log.Index,
        damaged: int,
    ) -> None:
        self._folder = folder
        self._ring = ring
        self._records = records
        self._index_descriptor = index_descriptor
        self._lock_descriptor = lock_descriptor
        self._fingerprint = fingerprint
        self._record_bytes = record_bytes
        self._slot_bytes = HEADER_BYTES + aligned(record_bytes)
        self._capacity = capacity
        self._index = index
        taken = {slot for slot, _ in index.values()}
        self._free = deque(slot for slot in range(capacity) if slot not in taken)
        self._users: dict[int, int] = {}
        """Slots being read, with the number of readers: they are not overwritten meanwhile."""
        self._writing: dict[bytes, asyncio.Future[None]] = {}
        self._headers = BufferPool(64, HEADER_BYTES)
        self._index_order = asyncio.Lock()
        self._hits = self._misses = self._rejected = self._failed_reads = self._failed_writes = self._evicted = 0
        self._damaged = damaged

    @classmethod
    async def open(
        cls, folder: Path, ring: Ring, *, fingerprint: bytes, record_bytes: int, capacity_bytes: int
    ) -> BlockStore:
        """Open or create the store in ``folder`` (made with mode 0700).

        ``fingerprint`` (16 bytes) names what the records depend on; records of another fingerprint are misses.
        ``record_bytes`` is the largest payload, ``capacity_bytes`` the cap on the file. Raises StoreLockedError when
        another process has the folder, ValueError for a capacity below one record, OSError.
        """
        slot_bytes = HEADER_BYTES + aligned(record_bytes)
        capacity = min(capacity_bytes // slot_bytes, MAX_SLOTS)
        if capacity < 1:
            raise ValueError(f"capacity_bytes is {capacity_bytes}; one record takes {slot_bytes}")
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint has {len(fingerprint)} bytes; it must have {FINGERPRINT_BYTES}")

        def prepare() -> BlockStore:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as undo:
                lock = _lock(folder / "lock")
                undo.callback(os.close, lock)
                path = folder / "index"
                # Slots of another size lie elsewhere: nothing in the file can be found any more.
                layout = folder / "layout"
                wanted = f"metrale-block-store 1 slot_bytes={slot_bytes}\n"
                if not layout.is_file() or layout.read_text() != wanted:
                    path.unlink(missing_ok=True)
                    _write_private(layout, wanted)
                index, entries, damaged = index_log.read_index(path, capacity)
                if entries > index_log.REWRITE_FACTOR * max(len(index), 64) or damaged:
                    index_log.rewrite(path, index)
                records = open_file(folder / "records", create=True)
                undo.callback(records.close)
                os.truncate(folder / "records", capacity * slot_bytes)
                log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
                undo.pop_all()
            return cls(
                folder,
                ring,
                records,
                log,
                lock,
                fingerprint=fingerprint,
                record_bytes=record_bytes,
                capacity=capacity,
                index=index,
                damaged=damaged,
            )

        return await asyncio.to_thread(prepare)

    def __contains__(self, key: bytes) -> bool:
        """Whether a record is in the index; only reading it proves that it is there."""
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    async def get(self, key: bytes, into: memoryview) -> int | None:
        """Read a record into ``into`` (aligned, at least the record rounded up to 4096 long); its length, or None.

        None means a miss, for whatever reason; what ``into`` holds then is undefined.
        """
        place = self._index.get(key)
        if place is None:
            self._misses += 1
            return None
        slot, nbytes = place
        self._index.move_to_end(key)
        self._users[slot] = self._users.get(slot, 0) + 1
        try:
            with await self._headers.acquire() as header:
                await self._ring.read(self._records, [header.memory, into[: aligned(nbytes)]], slot * self._slot_bytes)
                if payload_matches(header.memory, self._fingerprint, key, into[:nbytes]):
                    self._hits += 1
                    return nbytes
                self._rejected += 1
        except (FileIOError, EndOfFileError):
            self._failed_reads += 1
        finally:
            self._users[slot] -= 1
            if not self._users[slot]:
                del self._users[slot]
        self._misses += 1
        if self._index.get(key) == place:
            self._forget(key)
        return None

    async def put(self, key: bytes, payload: memoryview) -> bool:
        """Store a record and publish it. ``payload`` is aligned memory and stays as it is until the coroutine ends; one
        whose length is no multiple of 4096 is copied.

        False if it could not be stored (every slot is being read, a full or broken device); that is counted.
        A key that is stored already is left as it is.
        """
        nbytes = len(payload)
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes; allowed: 1 to {MAX_KEY_BYTES}")
        if not 0 < nbytes <= self._record_bytes:
            raise ValueError(f"a record of {nbytes} bytes; allowed: 1 to {self._record_bytes}")
        while (running := self._writing.get(key)) is not None:
            await asyncio.shield(running)
        if key in self._index:
            self._index.move_to_end(key)
            return True
        slot = self._take_slot()
        if slot is None:
            self._failed_writes += 1
            return False
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writing[key] = done
        stored = False
        try:
            stored = await self._write(slot, key, payload)
        finally:
            del self._writing[key]
            done.set_result(None)
            if not stored:
                self._free.append(slot)
                self._failed_writes += 1
        return stored

    async def delete(self, key: bytes) -> None:
        """Forget a record; harmless if there is none."""
        if key in self._index:
            self._forget(key)
            await self._log(index_log.delete_entry(key))

    def touch(self, key: bytes) -> None:
        """Mark a record as just used."""
        if key in self._index:
            self._index.move_to_end(key)

    def statistics(self) -> BlockStoreStatistics:
        return BlockStoreStatistics(
            records=len(self._index),
            capacity_records=self._capacity,
            record_bytes=self._record_bytes,
            hits_total=self._hits,
            misses_total=self._misses,
            rejected_total=self._rejected,
            failed_reads_total=self._failed_reads,
            failed_writes_total=self._failed_writes,
            evicted_total=self._evicted,
            damaged_index_entries=self._damaged,
        )

    async def close(self) -> None:
        """Let go of the folder. Nothing of the store may run any more."""
        if self._lock_descriptor < 0:
            return
        index = self._index.copy()

        def finish() -> None:
            # In the order of use, which the log does not record as it happens.
            with contextlib.suppress(OSError):
                index_log.rewrite(self._folder / "index", index)
            self._records.close()
            os.close(self._index_descriptor)
            os.close(self._lock_descriptor)
            self._lock_descriptor = -1

        await asyncio.to_thread(finish)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _take_slot(self) -> int | None:
        """A slot nobody needs: a free one, or that of the record used longest ago and not being read."""
        for _ in range(len(self._free)):
            slot = self._free.popleft()
            if slot not in self._users:
                return slot
            self._free.append(slot)
        for key, (slot, _) in self._index.items():
            if slot not in self._users:
                del self._index[key]
                self._evicted += 1
                return slot
        return None

    def _forget(self, key: bytes) -> None:
        slot, _ = self._index.pop(key)
        self._free.append(slot)

    async def _write(self, slot: int, key: bytes, payload: memoryview) -> bool:
        nbytes = len(payload)
        with await self._headers.acquire() as header:
            write_header(header.memory, self._fingerprint, key, payload)
            padded = _padded(payload)
            try:
                await self._ring.write(self._records, [header.memory, padded], slot * self._slot_bytes)
                await self._log(index_log.put_entry(key, slot, nbytes))
            except (FileIOError, OSError):
                return False
        self._index[key] = (slot, nbytes)
        return True

    async def _log(self, entry: bytes) -> None:
        """Append an entry to the index. One at a time, so that a torn one is always the last."""
        async with self._index_order:
            await asyncio.to_thread(os.write, self._index_descriptor, entry)


def _padded(payload: memoryview) -> memoryview:
    """``payload`` in whole alignment units; an odd-sized one is copied, with zeros behind it."""
    if len(payload) % ALIGNMENT == 0:
        return payload
    whole = memoryview(mmap.mmap(-1, aligned(len(payload))))
    whole[: len(payload)] = payload
    return whole


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLockedError(f"{path.parent} is used by the process {owner}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
