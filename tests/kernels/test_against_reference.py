"""The compiled operations compute what the reference computes, and the reference what torch computes in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from metrale_kernels import Operations
from torch import Tensor

from tests.kernels.cases import REFERENCE, attend, attention_case, implementations

COMPILED = [name for name in implementations() if name != "reference"]
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


@pytest.fixture(params=implementations())
def operations(request: pytest.FixtureRequest) -> Operations:
    return implementations()[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCES[dtype])


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 9, 40])
@pytest.mark.parametrize("inputs", [32, 130, 576])
def test_linear_is_a_fused_matrix_product_with_bias(
    operations: Operations, dtype: torch.dtype, rows: int, inputs: int
) -> None:
    weights = [randn(outputs, inputs, dtype=dtype, seed=outputs) for outputs in (33, 64, 7)]
    biases = [randn(33, dtype=dtype), None, randn(7, dtype=dtype)]
    packed = operations.pack_linear(weights, biases)
    assert (packed.out_features, packed.in_features) == (104, inputs)
    assert packed.nbytes >= 104 * inputs * dtype.itemsize
    wide = randn(rows, inputs + 8, dtype=dtype) / inputs**0.5
    x = wide[:, 8:]
    bias = torch.cat([biases[0], torch.zeros(64, dtype=dtype), biases[2]])  # type: ignore[list-item]
    expected = F.linear(x.double(), torch.cat(weights).double(), bias.double())
    close(operations.linear(x, packed), expected, dtype)
    as_float = operations.linear(x, packed, torch.float32)
    assert as_float.dtype == torch.float32
    close(as_float, expected, torch.float32)


@pytest.mark.parametrize("shape", [(5, 576), (20, 80), (3, 4, 64), (3, 2, 33)])
def test_rms_norm_of_rows_and_heads(operations: Operations, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inner = torch.Size(shape[1:]).numel()
    x = randn(shape[0], inner + 8, dtype=dtype)[:, 8:].unflatten(1, shape[1:])
    weight = randn(shape[-1], dtype=dtype, seed=1)
    expected = F.rms_norm(x.double(), (shape[-1],), weight.double(), 1e-5)
    close(operations.rms_norm(x, weight, 1e-5), expected, dtype)


def test_add_rms_norm_updates_the_residual(operations: Operations, dtype: torch.dtype) -> None:
    x, residual, weight = (randn(20, 96, dtype=dtype, seed=seed) for seed in range(3))
    expected_residual = x + residual
    normed = operations.add_rms_norm(x, residual, weight[0], 1e-6)
    assert torch.equal(residual, expected_residual)
    close(normed, F.rms_norm(residual.double(), (96,), weight[0].double(), 1e-6), dtype)


@pytest.mark.parametrize("rotated", [64, 32, 20])
def test_rotary_turns_pairs_and_leaves_the_rest(operations: Operations, dtype: torch.dtype, rotated: int) -> None:
    wide = randn(7, 6 * 64, dtype=dtype)
    query, key = wide[:, : 4 * 64].unflatten(1, (4, 64)), wide[:, 4 * 64 :].unflatten(1, (2, 64))
    positions = torch.tensor([0, 1, 5, 99, 3, 50, 7])
    angles = torch.arange(100)[:, None] * 10000.0 ** (-torch.arange(rotated // 2) / (rotated // 2))
    expected = []
    for heads in (query, key):
        pairs = torch.complex(heads[..., : rotated // 2].double(), heads[..., rotated // 2 : rotated].double())
        turned = pairs * torch.polar(torch.ones(()).double(), angles[positions, None].double())
        expected.append(torch.cat([turned.real, turned.imag, heads[..., rotated:].double()], dim=-1))
    operations.rotary_(query, key, positions, angles.cos().contiguous(), angles.sin().contiguous())
    close(query, expected[0], dtype)
    close(key, expected[1], dtype)


def test_silu_and_mul(operations: Operations, dtype: torch.dtype) -> None:
    gate_up = randn(21, 2 * 75, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 90.0, -90.0])
    gate, up = gate_up.double().chunk(2, dim=-1)
    close(operations.silu_and_mul(gate_up), F.silu(gate) * up, dtype)


def test_embedding_and_cache_writes_copy_bits(operations: Operations, dtype: torch.dtype) -> None:
    table = randn(50, 24, dtype=dtype)
    ids = torch.tensor([3, 49, 0, 3])
    assert torch.equal(operations.embedding(ids, table), table[ids])
    cache = torch.zeros(6, 2, 3, 8, 16, dtype=dtype)
    wide = randn(4, 2 * 3 * 16, dtype=dtype)
    key, value = wide[:, :48].unflatten(1, (3, 16)), wide[:, 48:].unflatten(1, (3, 16))
    slots = torch.tensor([5, 47, 16, 23])
    operations.write_kv(key, value, cache[:, 0], cache[:, 1], slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(cache[slot // 8, 0, :, slot % 8], key[row])
        assert torch.equal(cache[slot // 8, 1, :, slot % 8], value[row])
    assert int((cache != 0).sum()) == int((wide != 0).sum())


SEQUENCES = [[(1, 1)], [(1, 40), (33, 70), (1, 200), (5, 5)], [(130, 130)], [(1, 1025), (3, 1026)]]
SHAPES = [(9, 3, 64, 16), (4, 4, 32, 8), (8, 1, 80, 32), (2, 2, 96, 16), (6, 2, 256, 16), (4, 2, 128, 1)]


@pytest.mark.parametrize("sequences", SEQUENCES)
@pytest.mark.parametrize(("query_heads", "key_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [None, 1, 17, 64])
def test_attention_is_softmax_attention(
    operations: Operations,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    query_heads: int,
    key_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
) -> None:
    case = attention_case(
        sequences,
        query_heads=query_heads,
        key_heads=key_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    actual = attend(operations, case, window)
    for index, (rows, length) in enumerate(sequences):
        blocks = case.batch.block_tables[index, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks]
            .transpose(0, 1)
            .flatten(1, 2)[:, :length]
            .double()
            .repeat_interleave(query_heads // key_heads, 0)
            for cache in (case.keys, case.values)
        )
        query = case.query[case.rows(index)].double().transpose(0, 1)
        row_positions = torch.arange(length - rows, length)[:, None]
        seen = torch.arange(length) <= row_positions
        if window is not None:
            seen &= torch.arange(length) > row_positions - window
        expected = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen).transpose(0, 1)
        close(actual[case.rows(index)], expected, dtype)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("factor", [0.0, 300.0])
def test_equal_scores_and_large_scores(name: str, factor: float) -> None:
    case = attention_case([(70, 70)], query_heads=2, key_heads=2, head_dim=64)
    case.query.mul_(factor)
    close(attend(implementations()[name], case), attend(REFERENCE, case), torch.float32)
