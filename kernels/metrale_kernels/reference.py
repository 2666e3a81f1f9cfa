"""Every operation in plain torch, written for reading: what the others are held against, and what runs on CUDA without
Triton kernels or on a CPU without a compiler.

On CPU it keeps the row rule by giving torch one shape only: linear layers are computed in groups of ``ROW_GROUP``
zero-padded rows, and attention in tiles of ``QUERY_TILE`` rows by ``KEY_TILE`` keys that start at multiples of
``KEY_TILE``. (The bits of torch's products depend on the shapes they are called with, but not on a row's place or
neighbours within one shape.) On CUDA the same code runs with whole matrices, and the rule holds as far as the
library's kernels keep it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from torch import Tensor

from metrale_kernels import experts as mixture
from metrale_kernels.elementary import exp, sigmoid
from metrale_kernels.interface import DeltaLayer, DeltaStates, ExpertWeights, PackedExperts, PackedLinear, RaggedBatch

ROW_GROUP = 16
QUERY_TILE = 16
KEY_TILE = 64
HEAD_TILE = 16


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """Weights as they are: weight [N, K], bias [N] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class ReferenceOperations:
    """See :class:`metrale_kernels.interface.Operations` for shapes and rules."""

    name = "reference"

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> ReferenceLinear:
        packed = torch.cat(list(weights)) if len(weights) > 1 else weights[0].clone()
        if all(bias is None for bias in biases):
            return ReferenceLinear(packed, None)
        parts = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias
            for weight, bias in zip(weights, biases, strict=True)
        ]
        return ReferenceLinear(packed, torch.cat(parts))

    def linear(self, x: Tensor, weight: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        out_dtype = out_dtype or x.dtype
        # A product wanted in float32 must not be rounded to bfloat16 on its way.
        dtype = x.dtype if out_dtype == x.dtype else torch.float32
        matrix = weight.weight.to(dtype)
        bias = None if weight.bias is None else weight.bias.to(dtype)
        if x.device.type != "cpu":
            return F.linear(x.to(dtype), matrix, bias).to(out_dtype)
        rows = x.shape[0]
        out = torch.empty(rows, weight.out_features, dtype=out_dtype)
        for first in range(0, rows, ROW_GROUP):
            group = torch.zeros(ROW_GROUP, x.shape[1], dtype=dtype)
            count = min(ROW_GROUP, rows - first)
            group[:count] = x[first : first + count]
            out[first : first + count] = F.linear(group, matrix, bias)[:count]
        return out

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return table[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(_mean_of_squares(wide) + eps)
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rotary_(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[1]
        row_cos, row_sin = cos[positions, None], sin[positions, None]
        for heads in (query, key):
            first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
            # Both results before either is stored: in float32 the two halves are views of ``heads`` itself.
            rotated = first * row_cos - second * row_sin, second * row_cos + first * row_sin
            heads[..., :half], heads[..., half : 2 * half] = rotated[0].to(heads.dtype), rotated[1].to(heads.dtype)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (gate * sigmoid(gate) * up).to(gate_up.dtype)

    def sigmoid_and_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * sigmoid(gate.float())).to(x.dtype)

    def rms_norm_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = gate.float()
        return (self.rms_norm(x, weight, eps).float() * (wide * sigmoid(wide))).to(x.dtype)

    def gated_delta_net(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, layer: DeltaLayer, batch: RaggedBatch, states: DeltaStates
    ) -> Tensor:
        assert batch.state_reads is not None and batch.state_writes is not None
        out = torch.empty(mixed.shape[0], layer.value_heads, layer.value_dim, dtype=mixed.dtype, device=mixed.device)
        strength = sigmoid(beta.float())
        # The logarithm is taken in float64, where a last bit that depends on a value's place is lost in rounding.
        softplus = F.softplus((decay.float() + layer.bias).double()).float()
        keep = exp(layer.rate * softplus)
        starts = batch.query_starts.tolist()
        for index, (read, write) in enumerate(
            zip(batch.state_reads.tolist(), batch.state_writes.tolist(), strict=True)
        ):
            rows = slice(starts[index], starts[index + 1])
            is_fresh = int(batch.positions[rows][0]) == 0
            kept = torch.zeros_like(states.conv[read]) if is_fresh else states.conv[read]
            state = torch.zeros_like(states.recurrent[read]) if is_fresh else states.recurrent[read]
            inputs = torch.cat([kept, mixed[rows]])
            query, key, value = _convolved(inputs, layer)
            for row in range(mixed[rows].shape[0]):
                state, read_out = _delta_step(
                    state, query[row], key[row], value[row], keep[rows][row], strength[rows][row]
                )
                out[starts[index] + row] = read_out.to(mixed.dtype)
            states.recurrent[write] = state
            states.conv[write] = inputs[inputs.shape[0] - kept.shape[0] :]
        return out

    def route_experts(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        return mixture.route(logits, top_k, normalise)

    def pack_experts(self, experts: Iterable[ExpertWeights], count: int) -> mixture.SeparateExperts:
        return mixture.pack(self, experts)

    def apply_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        assert isinstance(experts, mixture.SeparateExperts)
        return mixture.apply(self, x, ids, weights, experts)

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        block_size = key_cache.shape[2]
        blocks, offsets = slots // block_size, slots % block_size
        key_cache[blocks, :, offsets] = key
        value_cache[blocks, :, offsets] = value

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        starts, lengths = batch.query_starts.tolist(), batch.context_lengths.tolist()
        for index, length in enumerate(lengths):
            rows = slice(starts[index], starts[index + 1])
            keys = _gather(key_cache, batch.block_tables[index], length)
            values = _gather(value_cache, batch.block_tables[index], length)
            attend = _attend_in_tiles if query.device.type == "cpu" else _attend_at_once
            out[rows] = attend(query[rows], keys, values, batch.positions[rows], scale, sliding_window)
        return out


def _convolved(inputs: Tensor, layer: DeltaLayer) -> tuple[Tensor, Tensor, Tensor]:
    """inputs [kernel - 1 + n, channels] -> queries and keys float32 [n, Hv, Dk], normalised, and values [n, Hv, Dv]."""
    kernel = layer.conv.shape[0]
    count = inputs.shape[0] - kernel + 1
    total = torch.zeros(count, inputs.shape[1], device=inputs.device)
    for offset in range(kernel):
        total = total + layer.conv[offset] * inputs[offset : offset + count].float()
    activated = total * sigmoid(total)
    keys = layer.key_heads * layer.key_dim
    groups = layer.value_heads // layer.key_heads
    query, key = (
        _l2_normalised(part.reshape(count, layer.key_heads, layer.key_dim)).repeat_interleave(groups, dim=1)
        for part in (activated[:, :keys], activated[:, keys : 2 * keys])
    )
    value = activated[:, 2 * keys :].reshape(count, layer.value_heads, layer.value_dim)
    return query * layer.key_dim**-0.5, key, value


def _l2_normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(_mean_of_squares(x) * x.shape[-1] + 1e-6)


def _delta_step(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, keep: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: state float32 [Hv, Dk, Dv], query and key [Hv, Dk], value [Hv, Dv], keep and strength [Hv] -> the new
    state, and what the query reads from it [Hv, Dv]."""
    state = state * keep[:, None, None]
    known = (state * key[:, :, None]).sum(dim=1)
    change = (value - known) * strength[:, None]
    state = state + key[:, :, None] * change[:, None, :]
    return state, (state * query[:, :, None]).sum(dim=1)


def _mean_of_squares(x: Tensor) -> Tensor:
    """float32 [..., D] -> [..., 1]. Halves are added pairwise, because torch may split one long sum over threads
    when there is a single row, and not otherwise."""
    squares = x * x
    width = squares.shape[-1]
    size = 1 << (width - 1).bit_length()
    squares = F.pad(squares, (0, size - width))
    while size > 1:
        size //= 2
        squares = squares[..., :size] + squares[..., size:]
    return squares / width


def _gather(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """[blocks, Hk, block size, D] -> float32 [Hk, keys, D], keys padded with zeros to a multiple of KEY_TILE."""
    _, heads, block_size, head_dim = cache.shape
    blocks = block_table[: -(-length // block_size)].long()
    rows = cache[blocks].transpose(0, 1).reshape(heads, -1, head_dim)[:, :length].float()
    return F.pad(rows, (0, 0, 0, -length % KEY_TILE)).contiguous()


def _attend_in_tiles(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """query [n, Hq, D], keys and values float32 [Hk, padded keys, D], positions int64 [n] -> float32 [n, Hq, D].

    Online softmax (Milakov & Gimelshein 2018) over key tiles in the order of position. Tiles that a row cannot see
    leave its
    sums as they are, bit for bit: its maximum stays, the factor is exp(0) = 1 and what is added is 0.
    """
    rows, query_heads, narrow = query.shape
    groups = query_heads // keys.shape[0]
    # At sizes such as 10 the bits of a row of a product do depend on its place; zeros up to the next multiple do not.
    head_dim = -(-narrow // HEAD_TILE) * HEAD_TILE
    query, keys, values = (F.pad(x, (0, head_dim - narrow)) for x in (query, keys, values))
    out = torch.empty(rows, query_heads, head_dim)
    wide = query.float().transpose(0, 1) * scale
    for first in range(0, rows, QUERY_TILE):
        count = min(QUERY_TILE, rows - first)
        # Contiguous also when full: the bits of a product depend on how its operands lie in memory.
        tile = F.pad(wide[:, first : first + count], (0, 0, 0, QUERY_TILE - count)).contiguous()
        row_positions = F.pad(positions[first : first + count], (0, QUERY_TILE - count), value=-1)
        for head in range(query_heads):
            maximum = torch.full((QUERY_TILE, 1), float("-inf"))
            total = torch.zeros(QUERY_TILE, 1)
            mixed = torch.zeros(QUERY_TILE, head_dim)
            for start in range(0, int(row_positions.max()) + 1, KEY_TILE):
                key_positions = torch.arange(start, start + KEY_TILE)
                seen = key_positions <= row_positions[:, None]
                if sliding_window is not None:
                    seen &= key_positions > row_positions[:, None] - sliding_window
                scores = tile[head] @ keys[head // groups, start : start + KEY_TILE].T
                scores = scores.masked_fill(~seen, float("-inf"))
                higher = torch.maximum(maximum, scores.amax(dim=1, keepdim=True))
                # A row that has seen nothing yet has no maximum; 0 keeps exp(-inf - maximum) at 0.
                finite = higher.masked_fill(higher == float("-inf"), 0.0)
                factor = exp(maximum - finite)
                weights = exp(scores - finite)
                total = total * factor + _row_sums(weights)
                mixed = mixed * factor + weights @ values[head // groups, start : start + KEY_TILE]
                maximum = higher
            out[first : first + count, head] = (mixed / total)[:count]
    return out[..., :narrow]


def _row_sums(x: Tensor) -> Tensor:
    """[n, KEY_TILE] -> [n, 1], halves added pairwise (see _mean_of_squares)."""
    width = x.shape[1]
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x


def _attend_at_once(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, sliding_window: int | None
) -> Tensor:
    """As :func:`_attend_in_tiles`, in one library call."""
    key_positions = torch.arange(keys.shape[1], device=query.device)
    seen = key_positions <= positions[:, None]
    if sliding_window is not None:
        seen &= key_positions > positions[:, None] - sliding_window
    groups = query.shape[1] // keys.shape[0]
    return F.scaled_dot_product_attention(
        query.float().transpose(0, 1),
        keys.repeat_interleave(groups, dim=0),
        values.repeat_interleave(groups, dim=0),
        attn_mask=seen,
        scale=scale,
    ).transpose(0, 1)
