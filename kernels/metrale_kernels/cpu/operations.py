"""The compiled operations behind the interface. Arguments travel as one packed struct of 8-byte fields; calls release
the interpreter lock."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from metrale_kernels.cpu.build import Build
from metrale_kernels.interface import DeltaLayer, DeltaStates, ExpertWeights, PackedExperts, PackedLinear, RaggedBatch

TILE: Final = 32
"""Outputs in a tile of packed weights (``TILE`` in linear.c)."""
MAX_HEAD_DIM: Final = 512
MAX_GROUPS: Final = 64
HUGE_PAGE_BYTES: Final = 2 * 2**20

_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}


class CpuLinear:
    """Weights in tiles, as linear.c reads them."""

    __slots__ = ("_bias", "_memory", "bias_pointer", "dtype", "in_features", "nbytes", "out_features", "pointer")

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype, bias: Tensor | None) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.dtype = dtype
        tiles = -(-out_features // TILE)
        size = tiles * TILE * in_features * dtype.itemsize
        # Anonymous memory is zero and page-aligned; large pages save the look-ups that limit reading it.
        self._memory = mmap.mmap(-1, -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.pointer = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._bias = None
        if bias is not None:
            self._bias = torch.zeros(tiles * TILE)
            self._bias[:out_features] = bias
        self.bias_pointer = 0 if self._bias is None else self._bias.data_ptr()
        self.nbytes = size + (0 if self._bias is None else self._bias.nbytes)


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """One projection of all experts is one linear layer, in which every expert begins with a tile of its own."""

    count: int
    inner: int
    gate: CpuLinear
    up: CpuLinear
    down: CpuLinear

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


class CpuOperations:
    """See :class:`metrale_kernels.interface.Operations`; every operation keeps the row rule."""

    name = "cpu"

    def __init__(self, build: Build) -> None:
        self.build = build
        self._pack = _entry(build.library, "op_pack", "QQqqqq")
        self._linear = _entry(build.library, "op_linear", "QQQQqqqqqq")
        self._norm = _entry(build.library, "op_rms_norm", "QQQQqqqqqdq")
        self._rotary = _entry(build.library, "op_rotary", "QQQQQqqqqqqqq")
        self._silu = _entry(build.library, "op_silu_and_mul", "QQqqqq")
        self._write = _entry(build.library, "op_write_kv", "QQQQQqqqqqqqqq")
        self._embedding = _entry(build.library, "op_embedding", "QQQqqq")
        self._gate = _entry(build.library, "op_sigmoid_and_mul", "QQQqqqqqq")
        self._gated_norm = _entry(build.library, "op_rms_norm_gated", "QQQQqqqqqdqQq")
        self._delta = _entry(build.library, "op_gated_delta_net", "QQQQQQQQQQQQQqqqqqqqqqq")
        self._route = _entry(build.library, "op_route_experts", "QQQqqqqq")
        self._experts = _entry(build.library, "op_apply_experts", "QQQQQQQqqqqqqq")
        self._attention = _entry(build.library, "op_attention", "QQQQQQQQqqqqqqqqqqqd")

    def pack_linear(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> CpuLinear:
        dtype, in_features = weights[0].dtype, weights[0].shape[1]
        if dtype not in _DTYPES or any(w.dtype != dtype or w.shape[1] != in_features for w in weights):
            raise ValueError("weights packed together need one type (float32 or bfloat16) and one number of inputs")
        if dtype == torch.bfloat16 and in_features % 2:
            raise ValueError(f"bfloat16 weights need an even number of inputs, not {in_features}")
        bias = None
        if any(b is not None for b in biases):
            parts = [torch.zeros(w.shape[0]) if b is None else b.float() for w, b in zip(weights, biases, strict=True)]
            bias = torch.cat(parts)
        packed = CpuLinear(sum(w.shape[0] for w in weights), in_features, dtype, bias)
        first = 0
        for weight in weights:
            self._put(weight, packed, first)
            first += weight.shape[0]
        return packed

    def _put(self, weight: Tensor, packed: CpuLinear, first: int) -> None:
        """Store weight [N, K] as outputs ``first`` and following."""
        rows = weight.contiguous()
        self._pack(rows.data_ptr(), packed.pointer, rows.shape[0], rows.shape[1], _DTYPES[rows.dtype], first)

    def linear(self, x: Tensor, weight: PackedLinear, out_dtype: torch.dtype | None = None) -> Tensor:
        assert isinstance(weight, CpuLinear) and x.dtype == weight.dtype and x.shape[1] == weight.in_features
        rows = x.shape[0]
        out = torch.empty(rows, weight.out_features, dtype=out_dtype or x.dtype)
        self._linear(
            x.data_ptr(),
            weight.pointer,
            weight.bias_pointer,
            out.data_ptr(),
            rows,
            weight.in_features,
            weight.out_features,
            x.stride(0),
            _DTYPES[x.dtype],
            _DTYPES[out.dtype],
        )
        return out

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        rows, width = token_ids.shape[0], table.shape[1]
        out = torch.empty(rows, width, dtype=table.dtype)
        self._embedding(token_ids.data_ptr(), table.data_ptr(), out.data_ptr(), rows, width, _DTYPES[table.dtype])
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalise(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalise(x, residual, weight, eps)

    def _normalise(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        assert weight.dtype in (x.dtype, torch.float32) and x.shape[-1] == weight.shape[0]
        out = torch.empty(x.shape, dtype=x.dtype)
        heads = x.shape[1] if x.dim() == 3 else 1
        residual_pointer = 0 if residual is None else residual.data_ptr()
        self._norm(
            x.data_ptr(),
            residual_pointer,
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            heads,
            x.shape[-1],
            x.stride(0),
            _DTYPES[x.dtype],
            eps,
            _DTYPES[weight.dtype],
        )
        return out

    def rotary_(self, query: Tensor, key: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        self._rotary(
            query.data_ptr(),
            key.data_ptr(),
            positions.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            query.shape[0],
            query.shape[1],
            key.shape[1],
            query.shape[2],
            cos.shape[1],
            query.stride(0),
            key.stride(0),
            _DTYPES[query.dtype],
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        self._silu(gate_up.data_ptr(), out.data_ptr(), rows, width, gate_up.stride(0), _DTYPES[gate_up.dtype])
        return out

    def sigmoid_and_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=x.dtype)
        step = 0 if gate.shape[1] == 1 and width != 1 else 1
        self._gate(
            x.data_ptr(),
            gate.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            x.stride(0),
            gate.stride(0),
            step,
            _DTYPES[x.dtype],
        )
        return out

    def rms_norm_gated(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        self._gated_norm(
            x.data_ptr(),
            0,
            weight.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            x.shape[2],
            x.stride(0),
            _DTYPES[x.dtype],
            eps,
            _DTYPES[weight.dtype],
            gate.data_ptr(),
            gate.stride(0),
        )
        return out

    def gated_delta_net(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, layer: DeltaLayer, batch: RaggedBatch, states: DeltaStates
    ) -> Tensor:
        assert batch.state_reads is not None and batch.state_writes is not None
        assert states.conv.dtype == mixed.dtype and states.recurrent.dtype == torch.float32
        out = torch.empty(mixed.shape[0], layer.value_heads, layer.value_dim, dtype=mixed.dtype)
        self._delta(
            mixed.data_ptr(),
            beta.data_ptr(),
            decay.data_ptr(),
            layer.conv.data_ptr(),
            layer.rate.data_ptr(),
            layer.bias.data_ptr(),
            states.conv.data_ptr(),
            states.recurrent.data_ptr(),
            out.data_ptr(),
            batch.state_reads.data_ptr(),
            batch.state_writes.data_ptr(),
            batch.positions.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.state_reads.shape[0],
            layer.key_heads,
            layer.value_heads,
            layer.key_dim,
            layer.value_dim,
            layer.conv.shape[0],
            mixed.stride(0),
            beta.stride(0),
            decay.stride(0),
            _DTYPES[mixed.dtype],
        )
        return out

    def route_experts(self, logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        rows, count = logits.shape
        assert logits.dtype == torch.float32 and top_k <= count
        ids = torch.empty(rows, top_k, dtype=torch.int64)
        weights = torch.empty(rows, top_k)
        self._route(
            logits.data_ptr(), ids.data_ptr(), weights.data_ptr(), rows, count, top_k, logits.stride(0), normalise
        )
        return ids, weights

    def pack_experts(self, experts: Iterable[ExpertWeights], count: int) -> CpuExperts:
        packed: CpuExperts | None = None
        for index, expert in enumerate(experts):
            inner, width = expert.gate.shape
            if packed is None:
                dtype = expert.gate.dtype
                if dtype not in _DTYPES or (dtype == torch.bfloat16 and (inner % 2 or width % 2)):
                    raise ValueError(f"experts of {inner} by {width} values in {dtype} cannot be packed")
                gate, up = (CpuLinear(count * _whole_tiles(inner), width, dtype, None) for _ in range(2))
                down = CpuLinear(count * _whole_tiles(width), inner, dtype, None)
                packed = CpuExperts(count, inner, gate, up, down)
            self._put(expert.gate, packed.gate, index * _whole_tiles(inner))
            self._put(expert.up, packed.up, index * _whole_tiles(inner))
            self._put(expert.down, packed.down, index * _whole_tiles(width))
        assert packed is not None
        return packed

    def apply_experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        assert isinstance(experts, CpuExperts) and x.dtype == experts.gate.dtype
        rows, width = x.shape
        assert width == experts.gate.in_features and ids.is_contiguous() and weights.is_contiguous()
        out = torch.empty(rows, width, dtype=x.dtype)
        self._experts(
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            experts.gate.pointer,
            experts.up.pointer,
            experts.down.pointer,
            out.data_ptr(),
            rows,
            width,
            experts.inner,
            experts.count,
            ids.shape[1],
            x.stride(0),
            _DTYPES[x.dtype],
        )
        return out

    def write_kv(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
        self._write(
            key.data_ptr(),
            value.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            key.shape[0],
            key.shape[1],
            key.shape[2],
            key_cache.shape[2],
            key.stride(0),
            value.stride(0),
            key_cache.stride(0),
            value_cache.stride(0),
            _DTYPES[key.dtype],
        )

    def attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: RaggedBatch,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        _, query_heads, head_dim = query.shape
        key_heads = key_cache.shape[1]
        assert head_dim <= MAX_HEAD_DIM and query_heads % key_heads == 0 and query_heads // key_heads <= MAX_GROUPS
        assert query.dtype == key_cache.dtype and (query.dtype != torch.bfloat16 or head_dim % 2 == 0)
        out = torch.empty(query.shape, dtype=query.dtype)
        self._attention(
            query.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            out.data_ptr(),
            batch.positions.data_ptr(),
            batch.query_starts.data_ptr(),
            batch.context_lengths.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.context_lengths.shape[0],
            query_heads,
            key_heads,
            head_dim,
            key_cache.shape[2],
            query.stride(0),
            key_cache.stride(0),
            value_cache.stride(0),
            batch.block_tables.stride(0),
            sliding_window or 0,
            _DTYPES[query.dtype],
            scale,
        )
        return out


def _whole_tiles(outputs: int) -> int:
    return -(-outputs // TILE) * TILE


def _entry(library: ctypes.CDLL, name: str, fields: str) -> Callable[..., None]:
    """A C operation as a function of its struct's fields (struct module codes, 8 bytes each)."""
    function = getattr(library, name)
    function.argtypes = [ctypes.c_char_p]
    function.restype = None
    pack = struct.Struct("=" + fields).pack

    def call(*arguments: float) -> None:
        function(pack(*arguments))

    return call
