"""Experts, gates and the gated delta net against float64 formulas written out, and in any company and chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from metrale_kernels import Operations, RaggedBatch
from metrale_kernels.cpu import set_num_threads
from metrale_kernels.interface import DeltaLayer, DeltaStates, ExpertWeights
from torch import Tensor

from tests.kernels.cases import implementations, same_bits

TOLERANCES = {torch.float32: {"rtol": 2e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-2}}


@pytest.fixture(params=["reference", "cpu", "cpu-portable"])
def operations(request: pytest.FixtureRequest) -> Operations:
    if request.param not in implementations():
        pytest.skip("there is no C compiler here")
    return implementations()[request.param]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), **TOLERANCES[dtype])


@pytest.mark.parametrize("width", [16, 33, 75, 128])
def test_gates_are_sigmoids(operations: Operations, dtype: torch.dtype, width: int) -> None:
    wide = randn(21, 2 * width + 3, dtype=dtype) * 3
    x, gate, one = wide[:, :width], wide[:, width : 2 * width], wide[:, -1:]
    close(operations.sigmoid_and_mul(x, gate), x.double() * gate.double().sigmoid(), dtype)
    close(operations.sigmoid_and_mul(x, one), x.double() * one.double().sigmoid(), dtype)


@pytest.mark.parametrize(("heads", "width"), [(3, 16), (2, 20), (4, 128)])
def test_gated_norm(operations: Operations, dtype: torch.dtype, heads: int, width: int) -> None:
    x, wide = randn(9, heads, width, dtype=dtype), randn(9, heads * width + 5, dtype=dtype, seed=1)
    gate, weight = wide[:, 5:].view(9, heads, width), randn(width, dtype=dtype, seed=2)
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-6) * F.silu(gate.double())
    close(operations.rms_norm_gated(x, gate, weight, 1e-6), expected, dtype)


@pytest.mark.parametrize("width", [40, 576])
def test_a_float32_weight_is_applied_before_rounding(operations: Operations, width: int) -> None:
    x, residual = randn(7, width, dtype=torch.bfloat16), randn(7, width, dtype=torch.bfloat16, seed=1)
    weight = 1 + randn(width, seed=2) * 2**-10
    expected = F.rms_norm(x.double(), (width,), weight.double(), 1e-6)
    # Rounded once, so nearly always to the nearest; rounding before the weight is applied would miss one in five.
    rounded = operations.rms_norm(x, weight, 1e-6)
    assert float((rounded == expected.bfloat16()).float().mean()) > 0.99
    summed = residual + x
    normed = operations.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, summed)
    assert same_bits(normed, operations.rms_norm(summed, weight, 1e-6))


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (5, 2), (8, 8), (16, 4), (60, 4), (256, 8)])
@pytest.mark.parametrize("normalise", [False, True])
def test_routing_takes_the_largest_of_a_softmax(
    operations: Operations, experts: int, top_k: int, normalise: bool
) -> None:
    logits = randn(37, experts + 3)[:, :experts] * 3
    ids, weights = operations.route_experts(logits, top_k, normalise)
    probabilities = logits.double().softmax(dim=-1)
    values, expected_ids = probabilities.topk(top_k)
    expected_ids, order = expected_ids.sort(dim=-1)
    values = values.gather(1, order)
    assert torch.equal(ids, expected_ids)
    close(weights, values / values.sum(dim=-1, keepdim=True) if normalise else values, torch.float32)


def test_of_equal_experts_the_first_are_taken(operations: Operations) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0], [0.0] * 6, [-1.0, -1.0, 5.0, -1.0, -1.0, 5.0]])
    ids, weights = operations.route_experts(logits, 3, True)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 2, 5]]
    close(weights[1], torch.full((3,), 1 / 3), torch.float32)


def test_extreme_logits_are_routed_and_nan_stays_in_its_row(operations: Operations) -> None:
    logits = torch.zeros(3, 5)
    logits[0, 3], logits[2, 1] = 300.0, -300.0
    logits[1] = float("nan")
    ids, weights = operations.route_experts(logits, 2, True)
    assert ids[0].tolist() == [0, 3] and ids[2].tolist() == [0, 2]
    assert weights[0].tolist() == [0.0, 1.0] and weights[2].tolist() == [0.5, 0.5]
    assert bool(((ids >= 0) & (ids < 5)).all())
    assert bool(weights[1].isnan().all())


def expert_weights(count: int, inner: int, width: int, dtype: torch.dtype) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            randn(inner, width, dtype=dtype, seed=3 * index) / width**0.5,
            randn(inner, width, dtype=dtype, seed=3 * index + 1) / width**0.5,
            randn(width, inner, dtype=dtype, seed=3 * index + 2) / inner**0.5,
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("rows", "experts", "top_k", "inner", "width"),
    [(1, 8, 2, 32, 64), (16, 8, 2, 48, 64), (300, 5, 3, 24, 40), (7, 1, 1, 130, 96), (140, 2, 2, 64, 66)],
)
def test_experts_are_weighted_feed_forward_blocks(
    operations: Operations, dtype: torch.dtype, rows: int, experts: int, top_k: int, inner: int, width: int
) -> None:
    weights = expert_weights(experts, inner, width, dtype)
    packed = operations.pack_experts(iter(weights), experts)
    assert packed.nbytes >= 3 * experts * inner * width * dtype.itemsize
    x = randn(rows, width + 6, dtype=dtype, seed=99)[:, 6:]
    ids, shares = operations.route_experts(randn(rows, experts, seed=7), top_k, True)
    expected = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        for index, share in zip(ids[row].tolist(), shares[row].tolist(), strict=True):
            expert, value = weights[index], x[row].double()
            hidden = F.silu(expert.gate.double() @ value) * (expert.up.double() @ value)
            expected[row] += share * (expert.down.double() @ hidden)
    close(operations.apply_experts(x, ids, shares, packed), expected, dtype)


def test_an_expert_that_few_rows_or_all_rows_take_gives_the_same_bits(
    operations: Operations, dtype: torch.dtype
) -> None:
    packed = operations.pack_experts(iter(expert_weights(4, 40, 64, dtype)), 4)
    x = randn(300, 64, dtype=dtype)
    logits = randn(300, 4, seed=1)
    logits[:, 2] += 4  # every row takes expert 2, in more than one piece
    ids, shares = operations.route_experts(logits, 2, False)
    whole = operations.apply_experts(x, ids, shares, packed)
    for rows in (slice(0, 1), slice(299, 300), slice(100, 229), slice(120, 250)):
        assert same_bits(operations.apply_experts(x[rows], ids[rows], shares[rows], packed), whole[rows])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    assert same_bits(operations.apply_experts(x[order], ids[order], shares[order], packed), whole[order])


@dataclass(frozen=True)
class DeltaCase:
    """A layer's constants and the inputs of some sequences, by sequence: [rows, channels + 2 * value_heads]."""

    layer: DeltaLayer
    inputs: list[Tensor]
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        layer = self.layer
        return 2 * layer.key_heads * layer.key_dim + layer.value_heads * layer.value_dim

    def states(self, places: int) -> DeltaStates:
        layer = self.layer
        conv = torch.full((places, layer.conv.shape[0] - 1, self.channels), float("nan"), dtype=self.dtype)
        return DeltaStates(conv, torch.full((places, layer.value_heads, layer.key_dim, layer.value_dim), float("nan")))


def delta_case(sizes: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, kernel: int = 4) -> DeltaCase:
    """``sizes``: key heads, value heads, key dim, value dim."""
    key_heads, value_heads, key_dim, value_dim = sizes
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    layer = DeltaLayer(
        conv=randn(kernel, channels, seed=1) / kernel**0.5,
        rate=-randn(value_heads, seed=2).exp(),
        bias=randn(value_heads, seed=3) - 2,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    inputs = [
        randn(length, channels + 2 * value_heads, dtype=dtype, seed=10 + index) for index, length in enumerate(lengths)
    ]
    return DeltaCase(layer, inputs, dtype)


def run(
    operations: Operations, case: DeltaCase, pieces: Sequence[tuple[int, int, int]], states: DeltaStates, flip: int
) -> list[Tensor]:
    """One call over (sequence, begin, end) pieces -> each piece's output. Sequence s has places 2 s and 2 s + 1, and
    reads the one of ``flip``."""
    counts = [end - begin for _, begin, end in pieces]
    starts = torch.tensor([0, *counts]).cumsum(0)
    joined = torch.cat([case.inputs[sequence][begin:end] for sequence, begin, end in pieces])
    sequences = torch.tensor([sequence for sequence, _, _ in pieces])
    batch = RaggedBatch(
        positions=torch.cat([torch.arange(begin, end) for _, begin, end in pieces]),
        slots=torch.zeros(len(joined), dtype=torch.int64),
        query_starts=starts.to(torch.int32),
        context_lengths=torch.tensor([end for _, _, end in pieces], dtype=torch.int32),
        block_tables=torch.zeros(len(pieces), 1, dtype=torch.int32),
        state_reads=2 * sequences + flip,
        state_writes=2 * sequences + 1 - flip,
        max_query_rows=max(counts),
        max_context_length=max(end for _, _, end in pieces),
    )
    channels, heads = case.channels, case.layer.value_heads
    out = operations.gated_delta_net(
        joined[:, :channels],
        joined[:, channels : channels + heads],
        joined[:, channels + heads :],
        case.layer,
        batch,
        states,
    )
    return list(out.split(counts))


def written_out(case: DeltaCase, sequence: int) -> tuple[Tensor, Tensor]:
    """The delta rule in float64, equation by equation -> outputs [T, Hv, Dv] and the last state [Hv, Dk, Dv]."""
    layer, inputs = case.layer, case.inputs[sequence].double()
    channels, heads, kernel = case.channels, layer.value_heads, layer.conv.shape[0]
    padded = F.pad(inputs[:, :channels], (0, 0, kernel - 1, 0))
    mixed = F.silu(F.conv1d(padded.T[None], layer.conv.double().T[:, None], groups=channels)[0].T)
    keys = layer.key_heads * layer.key_dim
    group = heads // layer.key_heads
    query, key = (
        F.normalize(part.unflatten(1, (layer.key_heads, -1)), dim=-1, eps=0).repeat_interleave(group, dim=1)
        for part in (mixed[:, :keys], mixed[:, keys : 2 * keys])
    )
    value = mixed[:, 2 * keys :].unflatten(1, (heads, -1))
    beta = inputs[:, channels : channels + heads].sigmoid()
    decay = (layer.rate.double() * F.softplus(inputs[:, channels + heads :] + layer.bias.double())).exp()
    state = torch.zeros(heads, layer.key_dim, layer.value_dim, dtype=torch.float64)
    outputs = []
    for t in range(inputs.shape[0]):
        state = state * decay[t][:, None, None]
        known = torch.einsum("hkv,hk->hv", state, key[t])
        state = state + torch.einsum("hk,hv->hkv", key[t], beta[t][:, None] * (value[t] - known))
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) / layer.key_dim**0.5)
    return torch.stack(outputs), state


SIZES = [(2, 4, 16, 16), (1, 3, 12, 20), (2, 2, 32, 80), (1, 2, 64, 128), (3, 3, 8, 48), (1, 1, 128, 33)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kernel", [1, 2, 4, 6])
def test_the_delta_net_is_the_delta_rule(
    operations: Operations, dtype: torch.dtype, sizes: tuple[int, ...], kernel: int
) -> None:
    lengths = [70, 1, 5]
    case = delta_case(sizes, lengths, dtype, kernel)
    states = case.states(6)
    outputs = run(operations, case, [(s, 0, length) for s, length in enumerate(lengths)], states, 0)
    for sequence, output in enumerate(outputs):
        expected, last = written_out(case, sequence)
        close(output, expected, dtype)
        close(states.recurrent[2 * sequence + 1], last, torch.float32)
        kept = F.pad(case.inputs[sequence][:, : case.channels], (0, 0, kernel - 1, 0))[lengths[sequence] :]
        assert torch.equal(states.conv[2 * sequence + 1], kept)
        assert bool(states.recurrent[2 * sequence].isnan().all())


@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (1, 2, 12, 20), (1, 1, 24, 80)], ids=str)
def test_chunks_and_neighbours_change_no_bit(
    operations: Operations, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    lengths = [90, 40, 3, 61]
    case = delta_case(sizes, lengths, dtype)
    alone = case.states(2)
    (whole,) = run(operations, case, [(0, 0, 90)], alone, 0)
    for chunk in (1, 7, 16, 64, 89):
        states, outputs, flip = case.states(8), [], 0
        for begin in range(0, 90, chunk):
            # The neighbours begin anew each time, at another place in the batch, and so differ from step to step.
            pieces = [(s, 0, 1 + (begin + s) % lengths[s]) for s in (1, 2, 3)]
            pieces.insert(begin % 4, (0, begin, min(begin + chunk, 90)))
            outputs.append(run(operations, case, pieces, states, flip)[begin % 4])
            flip = 1 - flip
        assert same_bits(torch.cat(outputs), whole)
        assert same_bits(states.recurrent[flip], alone.recurrent[1])
        assert same_bits(states.conv[flip], alone.conv[1])


def test_a_long_prompt_among_many_sequences(operations: Operations) -> None:
    """Rows are worked off in batches, whose borders cut sequences anywhere."""
    lengths = [1] * 250 + [530, 3, 300]
    case = delta_case((1, 2, 8, 16), lengths, torch.float32)
    states = case.states(2 * len(lengths))
    outputs = run(operations, case, [(s, 0, length) for s, length in enumerate(lengths)], states, 0)
    for sequence in (0, 249, 250, 251, 252):
        own = case.states(2 * len(lengths))
        (alone,) = run(operations, case, [(sequence, 0, lengths[sequence])], own, 0)
        assert same_bits(outputs[sequence], alone)
        assert same_bits(states.recurrent[2 * sequence + 1], own.recurrent[2 * sequence + 1])
        close(alone, written_out(case, sequence)[0], torch.float32)


def test_a_step_can_be_run_again(operations: Operations) -> None:
    """What a failed step wrote lies where nothing reads it, so that running it again gives the same."""
    case = delta_case((1, 2, 16, 16), [20, 9], torch.float32)
    states = case.states(4)
    run(operations, case, [(0, 0, 12), (1, 0, 4)], states, 0)
    first = run(operations, case, [(0, 12, 20), (1, 4, 9)], states, 1)
    again = [run(operations, case, [piece], states, 1)[0] for piece in ((0, 12, 20), (1, 4, 9))]
    for before, after in zip(first, again, strict=True):
        assert same_bits(before, after)


@pytest.mark.skipif("cpu" not in implementations(), reason="there is no C compiler here")
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    operations = implementations()["cpu"]
    case = delta_case((2, 4, 32, 80), [300, 1, 20], dtype)
    packed = operations.pack_experts(iter(expert_weights(5, 48, 64, dtype)), 5)
    x, logits = randn(200, 64, dtype=dtype), randn(200, 5)
    results = []
    try:
        for threads in (1, 2, 3):
            set_num_threads(threads)
            states = case.states(6)
            outputs = run(operations, case, [(0, 0, 300), (1, 0, 1), (2, 0, 20)], states, 0)
            ids, shares = operations.route_experts(logits, 2, True)
            results.append([*outputs, states.recurrent[1], operations.apply_experts(x, ids, shares, packed), shares])
    finally:
        set_num_threads(2)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(other, results[0], strict=True))


def test_what_cannot_be_packed_is_refused() -> None:
    operations = implementations().get("cpu")
    if operations is None:
        pytest.skip("there is no C compiler here")
    odd = [replace(expert) for expert in expert_weights(2, 3, 8, torch.bfloat16)]
    with pytest.raises(ValueError, match="experts of 3 by 8"):
        operations.pack_experts(odd, 2)


def test_any_decay_and_any_write_strength(operations: Operations) -> None:
    """From forgetting everything to keeping everything, in a state that large inputs do not blow up."""
    case = delta_case((1, 5, 8, 16), [40], torch.float32)
    case.inputs[0][:, -10:] *= 30  # logits of strength and decay far into both tails
    states = case.states(2)
    (output,) = run(operations, case, [(0, 0, 40)], states, 0)
    expected, last = written_out(case, 0)
    close(output, expected, torch.float32)
    close(states.recurrent[1], last, torch.float32)
