"""Experts and the gated delta net against their floors, and where a step of the trained hybrid spends its time.

    PYTHONPATH=.:kernels:storage python bench/hybrid_kernels.py

Floors, measured in the same run: bytes (experts' weights that some row takes; states read and written) over the
bandwidth of the C probe, and multiplications over what the linear kernel reaches within the caches: of weights in
bfloat16 for experts, in float32 for the recurrence, whose exact form takes four operations a token for each number of
its state (decay, write, read, recall under the next key).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from metrale_kernels import Operations, RaggedBatch, select_operations
from metrale_kernels.interface import DeltaLayer, DeltaStates, ExpertWeights
from rich.console import Console
from rich.table import Table

from kernels import median_ms, read_bandwidth, times_ms
from metrale_async.models import PagedCache, PagedState, RecurrentState, load_model, resolve_model

TINY_HYBRID = Path(__file__).parent.parent / "tests" / "data" / "tiny-hybrid"
BLOCK_SIZE = 16
# experts, experts a token, hidden, inner: the trained hybrid's; Qwen3-Next's with an eighth of its experts.
EXPERTS = [(8, 2, 192, 96), (64, 10, 2048, 512)]
# key heads, value heads, key and value head size: the trained hybrid's; those of Qwen3-Next and Qwen3.5.
DELTA = [(3, 6, 32), (16, 32, 128)]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def peak_flops(operations: Operations, dtype: torch.dtype) -> float:
    weight, rows = operations.pack_linear([randn(512, 576, dtype=dtype)], [None]), randn(256, 576, dtype=dtype)
    return 2 * 256 * 512 * 576 / min(times_ms(lambda: operations.linear(rows, weight), 200)) * 1e3


def ragged(sequences: int, rows: int, context: int) -> RaggedBatch:
    """Sequences of equal size; each reads its recurrent state at an even place."""
    blocks = -(-context // BLOCK_SIZE)
    tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    positions = torch.arange(context - rows, context).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(rows)
    return RaggedBatch(
        positions=positions,
        slots=tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32),
        context_lengths=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        state_reads=2 * torch.arange(sequences),
        state_writes=2 * torch.arange(sequences) + 1,
        max_query_rows=rows,
        max_context_length=context,
    )


def experts_table(operations: Operations, bandwidth: float) -> Table:
    peak = peak_flops(operations, torch.bfloat16)
    table = Table("experts", "rows", "routing ms", "experts ms", "floor ms", "of the floor", title="experts, a layer")
    for count, top_k, hidden, inner in EXPERTS:
        weights = (
            ExpertWeights(randn(inner, hidden), randn(inner, hidden), randn(hidden, inner)) for _ in range(count)
        )
        packed = operations.pack_experts(weights, count)
        for rows in (1, 16, 512):
            x, logits = randn(rows, hidden), randn(rows, count, dtype=torch.float32)
            ids, shares = operations.route_experts(logits, top_k, True)
            routing = median_ms(lambda logits=logits, k=top_k: operations.route_experts(logits, k, True), 100)
            ours = median_ms(lambda x=x, i=ids, s=shares, p=packed: operations.apply_experts(x, i, s, p))
            nbytes = 6 * hidden * inner * len(ids.unique())
            floor = max(nbytes / bandwidth, 6 * rows * top_k * hidden * inner / peak) * 1e3
            name = f"{top_k} of {count}, {hidden} by {inner}"
            table.add_row(name, f"{rows}", f"{routing:.3f}", f"{ours:.3f}", f"{floor:.3f}", f"{floor / ours:.0%}")
    return table


def delta_table(operations: Operations, bandwidth: float) -> Table:
    peak = peak_flops(operations, torch.float32)
    table = Table("heads", "sequences", "rows each", "ms", "floor ms", "of the floor", title="gated delta net, a layer")
    for key_heads, value_heads, size in DELTA:
        channels = (2 * key_heads + value_heads) * size
        layer = DeltaLayer(
            conv=randn(4, channels, dtype=torch.float32),
            rate=-torch.rand(value_heads),
            bias=torch.zeros(value_heads),
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=size,
            value_dim=size,
        )
        for sequences, rows in ((1, 1), (16, 1), (1, 512)):
            batch = ragged(sequences, rows, 600)
            states = DeltaStates(
                torch.zeros(2 * sequences, 3, channels, dtype=torch.bfloat16),
                torch.zeros(2 * sequences, value_heads, size, size),
            )
            inputs = randn(sequences * rows, channels + 2 * value_heads)
            parts = (inputs[:, :channels], inputs[:, channels:-value_heads], inputs[:, -value_heads:])
            ours = median_ms(lambda p=parts, ly=layer, b=batch, s=states: operations.gated_delta_net(*p, ly, b, s), 50)
            numbers = value_heads * size * size
            # An operation takes the place of a multiplication with addition, which the peak counts as two.
            floor = max(2 * 4 * sequences * numbers / bandwidth, 8 * sequences * rows * numbers / peak) * 1e3
            name = f"{key_heads} and {value_heads} of {size}"
            table.add_row(name, f"{sequences}", f"{rows}", f"{ours:.3f}", f"{floor:.3f}", f"{floor / ours:.0%}")
    return table


class Timed:
    """Operations that add up the time each takes."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self.seconds: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._operations, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[name] += time.perf_counter() - started
            return result

        return call if callable(function) else function


def step_table(operations: Operations, dtype: str) -> Table:
    timed: Any = Timed(operations)
    source = resolve_model(str(TINY_HYBRID))
    model = load_model(source, device=torch.device("cpu"), dtype=dtype, operations=timed).model
    table = Table("step", "ms", "tokens/s", "share of each operation", title=f"the trained hybrid, {dtype}")
    for name, sequences, rows, context in (
        ("1 decodes", 1, 1, 300),
        ("16 decode", 16, 1, 300),
        ("a prompt of 1,500", 1, 1500, 1500),
    ):
        batch = ragged(sequences, rows, context)
        blocks = sequences * -(-context // BLOCK_SIZE)
        states = [state for layer in model.states for state in layer]
        caches = [
            PagedCache(*(torch.zeros(blocks, s.heads, BLOCK_SIZE, s.head_dim, dtype=s.dtype) for _ in range(2)))
            for s in states
            if isinstance(s, PagedState)
        ]
        places = [torch.zeros(2 * sequences, *s.shape, dtype=s.dtype) for s in states if isinstance(s, RecurrentState)]
        tokens = torch.randint(0, model.vocab_size, (sequences * rows,))

        def step(tokens=tokens, batch=batch, caches=caches, places=places, count=sequences):  # type: ignore[no-untyped-def]
            return model.logits(model.forward(tokens, batch, caches, places)[-count:])

        rounds = 10 if rows > 1 else 100
        step()
        timed.seconds.clear()
        times = times_ms(step, rounds)
        total = sum(times) / 1e3 * (rounds + 1) / rounds
        shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in timed.seconds.most_common(7))
        ms = sorted(times)[rounds // 2]
        table.add_row(name, f"{ms:.2f}", f"{sequences * rows / ms * 1e3:,.0f}", shares)
    return table


def main() -> None:
    torch.set_num_threads(1)
    operations = select_operations(torch.device("cpu")).operations
    bandwidth = read_bandwidth(len(os.sched_getaffinity(0)))
    console = Console(width=160)
    console.print(f"{operations.name} kernels, reading {bandwidth / 1e9:.1f} GB/s")
    tables: list[Callable[[], Table]] = [
        lambda: experts_table(operations, bandwidth),
        lambda: delta_table(operations, bandwidth),
        lambda: step_table(operations, "bfloat16"),
        lambda: step_table(operations, "float32"),
    ]
    for table in tables:
        console.print(table())


if __name__ == "__main__":
    main()
