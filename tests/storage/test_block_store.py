from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import xxhash
from metrale_storage import BlockStore, BufferPool, Ring, StoreLockedError
from metrale_storage.record import HEADER_BYTES

from tests.storage.scripted_backend import FAULTS, Fault, ScriptedBackend

RECORD = 8192
SLOT = RECORD + HEADER_BYTES
FINGERPRINT = b"fingerprint-0001"


def content(key: bytes, nbytes: int = RECORD) -> bytes:
    """What the record of a key must hold."""
    return (xxhash.xxh3_128_digest(key) * (nbytes // 16 + 1))[:nbytes]


async def put(store: BlockStore, pool: BufferPool, key: bytes, nbytes: int = RECORD) -> bool:
    with await pool.acquire() as lease:
        lease.memory[:nbytes] = content(key, nbytes)
        return await store.put(key, lease.memory[:nbytes])


async def get(store: BlockStore, pool: BufferPool, key: bytes) -> bytes | None:
    with await pool.acquire() as lease:
        lease.memory[:] = b"?" * len(lease.memory)
        nbytes = await store.get(key, lease.memory)
        return None if nbytes is None else bytes(lease.memory[:nbytes])


async def open_store(folder: Path, ring: Ring, capacity: int = 16, fingerprint: bytes = FINGERPRINT) -> BlockStore:
    return await BlockStore.open(
        folder, ring, fingerprint=fingerprint, record_bytes=RECORD, capacity_bytes=capacity * SLOT
    )


@pytest.fixture
async def ring() -> AsyncIterator[Ring]:
    async with Ring.open(8) as opened:
        yield opened


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool(8, RECORD)


def key(index: int) -> bytes:
    return f"key-{index}".encode()


async def test_records_come_back_also_after_reopening(tmp_path: Path, ring: Ring, pool: BufferPool) -> None:
    sizes = [1, 100, 4095, 4096, 4097, RECORD]
    async with await open_store(tmp_path, ring) as store:
        for index, nbytes in enumerate(sizes):
            assert await put(store, pool, key(index), nbytes)
        assert await get(store, pool, b"missing") is None
    for _ in range(2):
        async with await open_store(tmp_path, ring) as store:
            for index, nbytes in enumerate(sizes):
                assert await get(store, pool, key(index)) == content(key(index), nbytes)
            assert store.statistics().hits_total == len(sizes)


async def test_the_record_used_longest_ago_makes_room(tmp_path: Path, ring: Ring, pool: BufferPool) -> None:
    async with await open_store(tmp_path, ring, capacity=4) as store:
        for index in range(4):
            await put(store, pool, key(index))
        assert await get(store, pool, key(0)) is not None
        store.touch(key(1))
        await put(store, pool, key(4))
        assert [key(index) in store for index in range(5)] == [True, True, False, True, True]
        assert store.statistics().evicted_total == 1
        assert os.stat(tmp_path / "records").st_size == 4 * SLOT
    async with await open_store(tmp_path, ring, capacity=4) as store:
        await put(store, pool, key(5))
        assert key(3) not in store


async def test_files_do_not_grow_in_number(tmp_path: Path, ring: Ring) -> None:
    small = BufferPool(8, 4096)
    async with await BlockStore.open(
        tmp_path, ring, fingerprint=FINGERPRINT, record_bytes=64, capacity_bytes=500 * 8192
    ) as store:
        for index in range(1000):
            assert await put(store, small, key(index), 64)
        assert len(store) == 500
    files = list(os.scandir(tmp_path))
    assert len(files) == 4
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


async def test_another_fingerprint_or_key_is_a_miss(tmp_path: Path, ring: Ring, pool: BufferPool) -> None:
    async with await open_store(tmp_path, ring) as store:
        await put(store, pool, key(1))
    async with await open_store(tmp_path, ring, fingerprint=b"fingerprint-0002") as store:
        assert await get(store, pool, key(1)) is None
        assert store.statistics().rejected_total == 1
        assert key(1) not in store


async def test_one_folder_has_one_owner(tmp_path: Path, ring: Ring) -> None:
    async with await open_store(tmp_path, ring):
        with pytest.raises(StoreLockedError, match=f"used by the process {os.getpid()}"):
            await open_store(tmp_path, ring)
    await (await open_store(tmp_path, ring)).close()


async def test_a_flipped_bit_anywhere_is_a_miss_and_never_a_wrong_record(
    tmp_path: Path, ring: Ring, pool: BufferPool
) -> None:
    async with await open_store(tmp_path, ring, capacity=3) as store:
        for index in range(3):
            await put(store, pool, key(index))
    originals = {name: (tmp_path / name).read_bytes() for name in ("records", "index")}
    rng = random.Random(1)
    rejected = 0
    for _ in range(300):
        name = rng.choice(("records", "index"))
        data = bytearray(originals[name])
        # Of a header block only the fields are meaningful; aim at them half of the time.
        place = (
            rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(3) * SLOT % len(data) + rng.randrange(90)
        )
        data[place % len(data)] ^= 1 << rng.randrange(8)
        (tmp_path / name).write_bytes(data)
        async with await open_store(tmp_path, ring, capacity=3) as store:
            for index in range(3):
                found = await get(store, pool, key(index))
                assert found is None or found == content(key(index))
                rejected += found is None
        for restored, bytes_ in originals.items():
            (tmp_path / restored).write_bytes(bytes_)
    assert rejected > 50


@pytest.mark.parametrize("cut", [0, 1, 63, 64, 65, 127, 128, 150])
async def test_a_torn_index_keeps_its_whole_entries(tmp_path: Path, ring: Ring, pool: BufferPool, cut: int) -> None:
    async with await open_store(tmp_path, ring) as store:
        for index in range(3):
            await put(store, pool, key(index))
    data = (tmp_path / "index").read_bytes()
    (tmp_path / "index").write_bytes(data[:cut])
    async with await open_store(tmp_path, ring) as store:
        assert len(store) == cut // 64
        for index in range(cut // 64):
            assert await get(store, pool, key(index)) == content(key(index))
        assert await put(store, pool, key(9))


async def test_garbage_for_an_index_is_an_empty_store(tmp_path: Path, ring: Ring, pool: BufferPool) -> None:
    (tmp_path / "index").write_bytes(random.Random(0).randbytes(64 * 50 + 7))
    async with await open_store(tmp_path, ring) as store:
        assert len(store) == 0
        assert await put(store, pool, key(1))
        assert await get(store, pool, key(1)) == content(key(1))


async def workload(store: BlockStore, pool: BufferPool) -> None:
    """More keys than slots, read back in between; whatever happens, what is returned is right."""
    for index in range(12):
        await put(store, pool, key(index))
        for back in (0, 3):
            found = await get(store, pool, key(max(0, index - back)))
            assert found is None or found == content(key(max(0, index - back)))


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_nth_operation_fails_for_every_n(tmp_path: Path, pool: BufferPool, fault: Fault) -> None:
    for n in range(1000):
        folder = tmp_path / str(n)
        backend = ScriptedBackend(fault, n)
        async with Ring(backend, 4) as ring, await open_store(folder, ring, capacity=5) as store:
            await workload(store, pool)
            statistics = store.statistics()
            assert statistics.records <= 5
        async with Ring(ScriptedBackend(), 4) as ring, await open_store(folder, ring, capacity=5) as store:
            for index in range(12):
                found = await get(store, pool, key(index))
                assert found is None or found == content(key(index))
        assert pool.num_free == pool.count
        if not backend.fault_happened:
            assert n > 20
            return
    pytest.fail("the workload never came through without a fault")


async def test_many_tasks_and_cancellations_at_every_await(tmp_path: Path, pool: BufferPool) -> None:
    async with Ring.open(4) as ring, await open_store(tmp_path, ring, capacity=6) as store:
        for turns in range(25):
            tasks = [
                asyncio.ensure_future(put(store, pool, key(i % 9)) if i % 2 else get(store, pool, key(i % 9)))
                for i in range(30)
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in tasks[turns % 3 :: 3]:
                task.cancel()
            for index, result in enumerate(await asyncio.gather(*tasks, return_exceptions=True)):
                if isinstance(result, bytes):
                    assert result == content(key(index % 9))
                else:
                    assert result in (True, False, None) or isinstance(result, asyncio.CancelledError)
            assert pool.num_free == pool.count
            assert len(store) + len(store._free) == 6


WRITER = """
import asyncio, sys
sys.path[:0] = {paths!r}
from pathlib import Path
from metrale_storage import BlockStore, BufferPool, Ring
from tests.storage.test_block_store import RECORD, SLOT, FINGERPRINT, key, put

async def main():
    pool = BufferPool(8, RECORD)
    async with Ring.open(8) as ring:
        store = await BlockStore.open(
            Path(sys.argv[1]), ring, fingerprint=FINGERPRINT, record_bytes=RECORD, capacity_bytes=64 * SLOT
        )
        number = int(sys.argv[2])
        while True:
            await asyncio.gather(*(put(store, pool, key(number + i)) for i in range(8)))
            number += 8
            print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_kill_minus_nine_at_any_moment_loses_only_what_was_not_published(tmp_path: Path) -> None:
    """Reopening finds every published record whole."""
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER).format(paths=[path for path in sys.path if path]))
    rng = random.Random(5)
    pool = BufferPool(8, RECORD)
    folder = tmp_path / "store"
    number = 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(12):
        process = subprocess.Popen(  # noqa: ASYNC220 (nothing else runs on this loop)
            [sys.executable, str(script), str(folder), str(number)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(1, 60)):
            number = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        number = int(rest[-1]) if rest and rest[-1].isdigit() else number
        async with Ring.open(8) as ring, await open_store(folder, ring, capacity=64) as store:
            # The newest 48 published records cannot have been evicted by the few that were being written.
            for index in range(max(0, number - 48), number):
                assert await get(store, pool, key(index)) == content(key(index)), index
            assert store.statistics().rejected_total == 0
