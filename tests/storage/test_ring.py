from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import uvloop
from metrale_storage import (
    BufferPool,
    EndOfFileError,
    File,
    FileIOError,
    NoSpaceError,
    Ring,
    RingClosedError,
    open_file,
)

from tests.storage.scripted_backend import ScriptedBackend

BackendChoice = Literal["io_uring", "threads"]
PIECE = 8192
Main = Callable[[Ring], Awaitable[None]]


@pytest.fixture(params=["io_uring", "threads"])
def backend(request: pytest.FixtureRequest) -> BackendChoice:
    choice: BackendChoice = request.param

    async def probe() -> None:
        await Ring.open(1, choice).close()

    try:
        asyncio.run(probe())
    except OSError as error:
        pytest.skip(f"no {choice} here: {error}")
    return choice


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, backend: BackendChoice) -> Callable[..., None]:
    """Run a coroutine function with a ring, on either loop and backend; afterwards nothing is left."""

    def runner(main: Main, depth: int = 8) -> None:
        async def whole() -> None:
            async with Ring.open(depth, backend) as ring:
                assert ring.backend_name == backend
                await main(ring)
                statistics = ring.statistics()
                assert statistics.running == statistics.waiting == 0

        # A first loop of a kind opens descriptors that the process keeps.
        with asyncio.Runner(loop_factory=request.param) as loop_runner:
            loop_runner.run(asyncio.sleep(0))
        before = len(os.listdir("/proc/self/fd"))
        with asyncio.Runner(loop_factory=request.param) as loop_runner:
            loop_runner.run(whole())
        assert len(os.listdir("/proc/self/fd")) <= before

    return runner


@pytest.fixture
def file(tmp_path: Path) -> File:
    opened = open_file(tmp_path / "data", create=True)
    os.pwrite(os.open(opened.path, os.O_WRONLY), b"".join(bytes([i]) * PIECE for i in range(64)), 0)
    return opened


def test_many_reads_at_once_bring_each_its_own_bytes(run: Callable[..., None], file: File) -> None:
    async def main(ring: Ring) -> None:
        pool = BufferPool(64, PIECE)
        leases = [await pool.acquire() for _ in range(64)]
        await asyncio.gather(*(ring.read(file, [lease.memory], index * PIECE) for index, lease in enumerate(leases)))
        for index, lease in enumerate(leases):
            assert bytes(lease.memory) == bytes([index]) * PIECE
        assert ring.statistics().read_bytes_total == 64 * PIECE

    run(main)


def test_what_is_written_is_read_in_pieces_and_seen_by_torch(run: Callable[..., None], file: File) -> None:
    async def main(ring: Ring) -> None:
        pool = BufferPool(4, PIECE)
        with await pool.acquire() as a, await pool.acquire() as b, await pool.acquire() as c:
            tensor = torch.frombuffer(a.memory, dtype=torch.float32)
            tensor.copy_(torch.arange(len(tensor)))
            b.memory[:] = b"b" * PIECE
            assert await ring.write(file, [a.memory, b.memory], 3 * PIECE) == 2 * PIECE
            await ring.fsync(file)
            await ring.read(file, [c.memory[:4096]], 3 * PIECE)
            assert torch.equal(torch.frombuffer(c.memory, dtype=torch.float32)[:1024], tensor[:1024])
            await ring.read(file, [c.memory], 4 * PIECE)
            assert bytes(c.memory) == b"b" * PIECE
        assert pool.num_free == 4

    run(main)


def test_no_more_operations_run_than_the_depth(run: Callable[..., None], file: File) -> None:
    async def main(ring: Ring) -> None:
        pool = BufferPool(32, PIECE)
        leases = [await pool.acquire() for _ in range(32)]
        tasks = [asyncio.ensure_future(ring.read(file, [lease.memory], 0)) for lease in leases]
        await asyncio.sleep(0)
        statistics = ring.statistics()
        assert statistics.running == 3
        assert statistics.waiting == 29
        await asyncio.gather(*tasks)

    run(main, depth=3)


def test_cancelled_operations_leave_memory_places_and_the_ring_usable(run: Callable[..., None], file: File) -> None:
    async def main(ring: Ring) -> None:
        pool = BufferPool(16, PIECE)

        async def read(index: int) -> None:
            with await pool.acquire() as lease:
                await ring.read(file, [lease.memory], index * PIECE)

        for turns in range(6):
            tasks = [asyncio.ensure_future(read(index)) for index in range(40)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
            assert results[1::2] == [None] * 20
            assert pool.num_free == 16
        with await pool.acquire() as lease:
            await ring.read(file, [lease.memory], 5 * PIECE)
            assert bytes(lease.memory) == b"\5" * PIECE

    run(main)


def test_errors_are_typed_and_say_where(run: Callable[..., None], file: File) -> None:
    async def main(ring: Ring) -> None:
        pool = BufferPool(1, PIECE)
        with await pool.acquire() as lease:
            with pytest.raises(EndOfFileError, match="ends 0 bytes after"):
                await ring.read(file, [lease.memory], 1000 * PIECE)
            with pytest.raises(EndOfFileError, match="ends 4096 bytes after"):
                await ring.read(file, [lease.memory], 64 * PIECE - 4096)
            gone = File(file.path, 9999, True)
            with pytest.raises(FileIOError, match=r"read of 8192 bytes at 4096 of .*data: Bad file descriptor"):
                await ring.read(gone, [lease.memory], 4096)
            with pytest.raises(FileIOError, match="fsync"):
                await ring.fsync(gone)
        assert ring.statistics().failures_total == 4
        await ring.close()
        with pytest.raises(RingClosedError):
            await ring.fsync(file)

    run(main)


def test_files_are_private(tmp_path: Path) -> None:
    opened = open_file(tmp_path / "new", create=True)
    assert stat.S_IMODE(opened.path.stat().st_mode) == 0o600
    opened.close()
    opened.close()


@pytest.mark.parametrize("depth", [0, 1025])
async def test_the_depth_has_limits(depth: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        Ring.open(depth)
    for allowed in (1, 1024):
        await Ring.open(allowed, "threads").close()


async def test_short_transfers_go_on_where_they_stopped(file: File) -> None:
    for kind in ("read", "write"):
        ring = Ring(ScriptedBackend("short", 0), 4)
        pool = BufferPool(2, PIECE)
        with await pool.acquire() as a, await pool.acquire() as b:
            a.memory[:], b.memory[:] = b"x" * PIECE, b"y" * PIECE
            await getattr(ring, kind)(file, [a.memory, b.memory], 2 * PIECE)
            expected = (b"\2", b"\3") if kind == "read" else (b"x", b"y")
            if kind == "write":
                await ring.read(file, [a.memory, b.memory], 2 * PIECE)
            assert (bytes(a.memory), bytes(b.memory)) == (expected[0] * PIECE, expected[1] * PIECE)
        assert ring.statistics().continued_total == 1


async def test_a_full_device_is_told_apart(file: File) -> None:
    ring = Ring(ScriptedBackend("ENOSPC", 0), 4)
    with await BufferPool(1, PIECE).acquire() as lease, pytest.raises(NoSpaceError):
        await ring.write(file, [lease.memory], 0)


async def test_a_cancelled_read_keeps_its_buffer_until_the_system_lets_go(file: File) -> None:
    backend = ScriptedBackend("late", 0)
    ring = Ring(backend, 4)
    pool = BufferPool(1, PIECE)

    async def read() -> None:
        with await pool.acquire() as lease:
            await ring.read(file, [lease.memory], 0)

    task = asyncio.ensure_future(read())
    await asyncio.sleep(0)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert backend.cancelled == 1
    assert pool.num_free == 0
    assert not task.done()
    backend.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.num_free == 1


async def test_buffers_are_handed_on_in_order_and_survive_cancelled_waits() -> None:
    pool = BufferPool(1, 100)
    assert pool.buffer_bytes == 4096
    lease = await pool.acquire()
    waits = [asyncio.ensure_future(pool.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()
    lease.release()
    lease.release()
    second = await waits[1]
    waits[2].cancel()
    second.release()
    await asyncio.gather(*waits, return_exceptions=True)
    assert pool.num_free == 1
