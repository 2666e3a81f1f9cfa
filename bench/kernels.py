"""Every operation at SmolLM2's sizes against its floor, measured in the same run.

    PYTHONPATH=.:kernels:storage python bench/kernels.py

Floors: bytes over the bandwidth a C probe reads with as many threads (at few rows the weights must be read once), and
multiplications over what the linear kernel reaches on a problem that fits the caches (at many rows). torch's own
bfloat16 linear runs beside ours.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from metrale_kernels import RaggedBatch, select_operations
from rich.console import Console
from rich.table import Table

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, VOCAB = 576, 9, 3, 64, 1536, 30, 49152
LAYER_SHAPES = [((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
PROBE = """
#include <pthread.h>
#include <stdint.h>
static const uint64_t *data; static int64_t words, threads; static uint64_t sums[256];
static void *work(void *n) {
    int64_t i = (int64_t)n, begin = words / threads * i, end = begin + words / threads;
    uint64_t s[8] = {0};
    for (int64_t k = begin; k < end; k += 8) {
        __builtin_prefetch(data + k + 512);
        for (int j = 0; j < 8; j++) s[j] += data[k + j];
    }
    sums[i] = s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
    return 0;
}
uint64_t probe(const uint64_t *d, int64_t w, int64_t t) {
    pthread_t ids[256]; data = d; words = w; threads = t;
    for (int64_t i = 0; i < t; i++) pthread_create(&ids[i], 0, work, (void *)i);
    for (int64_t i = 0; i < t; i++) pthread_join(ids[i], 0);
    return sums[0];
}
"""


def times_ms(work: Callable[[], object], rounds: int) -> list[float]:
    work()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def median_ms(work: Callable[[], object], rounds: int = 25) -> float:
    return statistics.median(times_ms(work, rounds))


def apply_all(linear: Callable[..., object], inputs: Sequence[torch.Tensor], weights: Sequence[object]) -> None:
    for x, weight in zip(inputs, weights, strict=True):
        linear(x, weight)


def read_bandwidth(threads: int) -> float:
    """Bytes per second of reading 256 MiB."""
    memory = torch.ones(32 * 2**20, dtype=torch.int64)
    with tempfile.TemporaryDirectory() as name:
        source, library = Path(name) / "probe.c", Path(name) / "probe.so"
        source.write_text(PROBE)
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
        probe = ctypes.CDLL(str(library)).probe
        probe.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        # A floor is what was possible at best.
        return memory.nbytes / min(times_ms(lambda: probe(memory.data_ptr(), memory.numel(), threads), 25)) * 1e3


def main() -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    operations = select_operations(torch.device("cpu")).operations
    bandwidth = read_bandwidth(torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weights = [randn(*shape) for _ in range(LAYERS) for shape in LAYER_SHAPES]
    packed = [operations.pack_linear([weight], [None]) for weight in weights]
    head = operations.pack_linear([randn(VOCAB, HIDDEN)], [None])
    cached, rows_cached = operations.pack_linear([randn(512, HIDDEN)], [None]), randn(256, HIDDEN)
    peak = 2 * 256 * 512 * HIDDEN / min(times_ms(lambda: operations.linear(rows_cached, cached), 200)) * 1e3
    console = Console()
    console.print(f"{operations.name} kernels, reading {bandwidth / 1e9:.1f} GB/s, products {peak / 1e9:.0f} GFLOP/s")

    table = Table("what", "rows", "ms", "floor ms", "of the floor", "torch bf16 ms", title="linear layers")
    for rows in (1, 4, 16, 64, 256, 2048):
        inputs = [randn(rows, weight.shape[1]) for weight in weights]
        ours = median_ms(partial(apply_all, operations.linear, inputs, packed))
        theirs = median_ms(partial(apply_all, torch.nn.functional.linear, inputs, weights), 5)
        nbytes, flops = sum(w.nbytes for w in packed), 2 * rows * sum(w.numel() for w in weights)
        floor = max(nbytes / bandwidth, flops / peak) * 1e3
        table.add_row("all of a step", f"{rows}", f"{ours:.2f}", f"{floor:.2f}", f"{floor / ours:.0%}", f"{theirs:.2f}")
    for rows in (1, 16, 64):
        ours = median_ms(partial(operations.linear, randn(rows, HIDDEN), head, torch.float32))
        floor = max(head.nbytes / bandwidth, 2 * rows * VOCAB * HIDDEN / peak) * 1e3
        table.add_row("logits", f"{rows}", f"{ours:.2f}", f"{floor:.2f}", f"{floor / ours:.0%}", "")
    console.print(table)

    table = Table("sequences", "rows each", "context", "ms a layer", "floor ms", "of the floor", title="attention")
    for sequences, rows, context in ((1, 1, 256), (16, 1, 256), (64, 1, 256), (1, 1, 8192), (1, 2048, 2048)):
        ours, floor = attention_ms(operations, sequences, rows, context, bandwidth, peak)
        table.add_row(*map(str, (sequences, rows, context)), f"{ours:.3f}", f"{floor:.3f}", f"{floor / ours:.0%}")
    console.print(table)


def attention_ms(operations, sequences: int, rows: int, context: int, bandwidth: float, peak: float):  # type: ignore[no-untyped-def]
    blocks = -(-context // 16)
    cache = torch.randn(sequences * blocks, 2, KV_HEADS, 16, HEAD_DIM).bfloat16()
    query = torch.randn(sequences * rows, HEADS, HEAD_DIM).bfloat16()
    batch = RaggedBatch(
        positions=torch.arange(context - rows, context).repeat(sequences),
        slots=torch.zeros(sequences * rows, dtype=torch.int64),
        query_starts=torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32),
        context_lengths=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks),
        state_reads=None,
        state_writes=None,
        max_query_rows=rows,
        max_context_length=context,
    )
    ours = median_ms(lambda: operations.attention(query, cache[:, 0], cache[:, 1], batch, 0.125, None), 100)
    pairs = sequences * sum(range(context - rows + 1, context + 1))
    return ours, max(cache.nbytes / bandwidth, pairs * HEADS * HEAD_DIM * 4 / peak) * 1e3


if __name__ == "__main__":
    main()
