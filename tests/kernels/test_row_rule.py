"""A row's result depends neither on its neighbours, its place, the number of rows or threads, nor on how it is cut."""

from __future__ import annotations

import pytest
import torch
from metrale_kernels import Operations, RaggedBatch
from metrale_kernels.cpu import set_num_threads
from metrale_kernels.interface import DeltaLayer, DeltaStates, ExpertWeights

from tests.kernels.cases import attend, attention_case, implementations, same_bits

ROW_COUNTS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 130]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["reference", "cpu", "cpu-portable"])
def operations(request: pytest.FixtureRequest) -> Operations:
    if request.param not in implementations():
        pytest.skip("there is no C compiler here")
    return implementations()[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 64), (96, 576), (33, 130)])
def test_linear(operations: Operations, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    packed = operations.pack_linear([weight], [torch.randn(outputs, generator=generator).to(dtype)])
    x = torch.randn(130, inputs, generator=generator).to(dtype)
    for out_dtype in (dtype, torch.float32):
        whole = operations.linear(x, packed, out_dtype)
        for rows in ROW_COUNTS:
            noisy = torch.full((rows, inputs), float("nan"), dtype=dtype)
            place = rows * 7 % rows if rows > 1 else 0
            noisy[place] = x[rows % 130]
            assert same_bits(operations.linear(noisy, packed, out_dtype)[place], whole[rows % 130])
            assert same_bits(operations.linear(x[:rows], packed, out_dtype), whole[:rows])
        order = torch.randperm(130, generator=generator)
        assert same_bits(operations.linear(x[order], packed, out_dtype), whole[order])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 576])
def test_row_operations(operations: Operations, dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(130, width, generator=generator).to(dtype)
    residual = torch.randn(130, width, generator=generator).to(dtype)
    weight = torch.randn(width, generator=generator).to(dtype)
    norm = operations.rms_norm(x, weight, 1e-5)
    summed = residual.clone()
    added = operations.add_rms_norm(x, summed, weight, 1e-5)
    silu = operations.silu_and_mul(x)
    for rows in ROW_COUNTS:
        assert same_bits(operations.rms_norm(x[:rows], weight, 1e-5), norm[:rows])
        own = residual[:rows].clone()
        assert same_bits(operations.add_rms_norm(x[:rows], own, weight, 1e-5), added[:rows])
        assert same_bits(own, summed[:rows])
        assert same_bits(operations.silu_and_mul(x[130 - rows :]), silu[130 - rows :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_gated_norms_and_experts(operations: Operations, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, gate, weight = randn(130, 6, 20), randn(130, 6, 20), randn(20)
    flat, flat_gate, one_gate = x.flatten(1), gate.flatten(1), gate.flatten(1)[:, :1]
    experts = operations.pack_experts(
        (ExpertWeights(randn(24, 120), randn(24, 120), randn(120, 24)) for _ in range(5)), 5
    )
    logits = randn(130, 5).float()

    def results(rows: slice) -> list[torch.Tensor]:
        ids, weights = operations.route_experts(logits[rows], 2, True)
        return [
            operations.sigmoid_and_mul(flat[rows], flat_gate[rows]),
            operations.sigmoid_and_mul(flat[rows], one_gate[rows]),
            operations.rms_norm_gated(x[rows], gate[rows], weight, 1e-5),
            weights,
            operations.apply_experts(flat[rows], ids, weights, experts),
        ]

    whole = results(slice(0, 130))
    for rows in ROW_COUNTS:
        for got, expected in zip(results(slice(130 - rows, 130)), whole, strict=True):
            assert same_bits(got, expected[130 - rows :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_heads", "value_heads", "key_dim", "value_dim"), [(2, 4, 16, 16), (1, 3, 12, 20)])
def test_delta_net_in_any_chunks_among_others(
    operations: Operations, dtype: torch.dtype, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    layer = DeltaLayer(
        conv=torch.randn(4, channels, generator=generator),
        rate=-torch.rand(value_heads, generator=generator),
        bias=torch.randn(value_heads, generator=generator),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    length = 40
    data = torch.randn(length, channels + 2 * value_heads, generator=generator).to(dtype)
    noise = torch.randn(90, channels + 2 * value_heads, generator=generator).to(dtype)

    def run(chunk: int, neighbours: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        states = DeltaStates(
            torch.full((8, 3, channels), float("nan"), dtype=dtype),
            torch.full((8, value_heads, key_dim, value_dim), float("nan")),
        )
        outputs = []
        place = 0
        for start in range(0, length, chunk):
            rows = [data[start : start + chunk], *(noise[3 * i : 3 * i + 1 + i] for i in range(neighbours))]
            rows = rows[1:] + rows[:1]
            counts = [len(part) for part in rows]
            starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
            joined = torch.cat(rows)
            positions = [torch.arange(count) for count in counts[:-1]] + [torch.arange(start, start + counts[-1])]
            batch = RaggedBatch(
                positions=torch.cat(positions),
                slots=torch.zeros(len(joined), dtype=torch.int64),
                query_starts=starts,
                context_lengths=torch.tensor([int(part[-1]) + 1 for part in positions], dtype=torch.int32),
                block_tables=torch.zeros(len(rows), 1, dtype=torch.int32),
                state_reads=torch.tensor([2] * neighbours + [place]),
                state_writes=torch.tensor([3 + i for i in range(neighbours)] + [1 - place]),
                max_query_rows=max(counts),
                max_context_length=length,
            )
            out = operations.gated_delta_net(
                joined[:, :channels],
                joined[:, channels : channels + value_heads],
                joined[:, channels + value_heads :],
                layer,
                batch,
                states,
            )
            outputs.append(out[int(starts[-2]) :])
            place = 1 - place
        return torch.cat(outputs), states.recurrent[place], states.conv[place]

    whole = run(length, 0)
    assert bool(torch.isfinite(whole[0]).all())
    for chunk, neighbours in ((1, 0), (1, 3), (7, 2), (16, 1), (39, 0), (length, 4)):
        for got, expected in zip(run(chunk, neighbours), whole, strict=True):
            assert same_bits(got, expected)


SHAPES = [
    (3, 3, 32, 16),
    (6, 2, 64, 16),
    (8, 1, 128, 8),
    (9, 3, 64, 32),
    (5, 5, 80, 16),
    (2, 1, 96, 16),
    (2, 2, 256, 16),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("query_heads", "key_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [None, 37])
def test_attention_in_chunks_and_among_others(
    operations: Operations,
    dtype: torch.dtype,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    def run(sequences: list[tuple[int, int]], sequence: int = 0) -> torch.Tensor:
        case = attention_case(
            sequences,
            query_heads=query_heads,
            key_heads=key_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            seed=3,
        )
        return attend(operations, case, window)[case.rows(sequence)]

    length = 90
    whole = run([(length, length)])
    assert bool(torch.isfinite(whole).all())
    others = [(3, 30), (1, 70), (20, 20)]
    for sequence in range(4):
        assert same_bits(run([*others[:sequence], (length, length), *others[sequence:]], sequence), whole)
    # A prefix of the keys is another draw, so chunks are the newest rows of the same sequence.
    for chunk in (1, 7, 16, 64):
        assert same_bits(run([(chunk, length)]), whole[-chunk:])
        assert same_bits(run([(1, 55), (chunk, length), (5, 60)], 1), whole[-chunk:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_many_partitions(operations: Operations, dtype: torch.dtype) -> None:
    """Long contexts are cut into partitions that threads may share: decode, chunks and prefill still agree."""
    length = 2300
    for window in (None, 1500):
        results = {}
        for rows in (1, 2, 40):
            case = attention_case([(rows, length)], query_heads=3, key_heads=1, head_dim=32, dtype=dtype, seed=5)
            results[rows] = attend(operations, case, window)
        assert same_bits(results[2][-1:], results[1])
        assert same_bits(results[40][-2:], results[2])


@pytest.mark.skipif("cpu" not in implementations(), reason="there is no C compiler here")
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    operations = implementations()["cpu"]
    case = attention_case([(1, 2100), (40, 200), (1, 5)], query_heads=6, key_heads=2, head_dim=64, dtype=dtype, seed=1)
    weight = torch.randn(200, 64).to(dtype)
    packed = operations.pack_linear([weight], [None])
    x = torch.randn(300, 64).to(dtype)
    results = []
    try:
        for threads in (1, 2, 3, 2):
            set_num_threads(threads)
            results.append((attend(operations, case), operations.linear(x, packed)))
    finally:
        set_num_threads(2)
    for attention, linear in results[1:]:
        assert same_bits(attention, results[0][0])
        assert same_bits(linear, results[0][1])
