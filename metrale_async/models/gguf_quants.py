"""Dequantising GGUF blocks with torch, slab by slab, straight into the wanted type.

Block layouts are ggml's (ggml-common.h); values are computed in float32 in the order the ``gguf`` library uses, so both
agree bit for bit. The library's own functions work on 16 rows at a time, which is several times slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

_SLAB_VALUES: Final = 1 << 19
"""Values dequantised at a time: the float32 intermediates then stay in the processor's caches."""


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte ``start`` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [blocks, groups, n] -> [blocks, groups * 2 * n]: low halves of a group's bytes, then high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """uint8 [blocks, 4], little-endian bits -> [blocks, 32], each 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(2) >> shifts) & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, None, 2:]).to(torch.float32) - 8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, None, 4:]).to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, None, 6:]) | _fifth_bits(blocks[:, 2:6])
    return (values.to(torch.float32) - 16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, None, 8:]) | _fifth_bits(blocks[:, 4:8])
    return values.to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the 8 sub-blocks of Q4_K and Q5_K, float32 [blocks, 8, 1]; 6 bits each in bytes 4 to 15."""
    scale, minimum, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scale & 63, (high & 15) | ((scale >> 2) & 48)), dim=1)
    minima = torch.cat((minimum & 63, (high >> 4) | ((minimum >> 2) & 48)), dim=1)
    return (_half(blocks, 0) * scales).unsqueeze(2), (_half(blocks, 2) * minima).unsqueeze(2)


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return values.to(torch.float32).mul_(scales).sub_(minima).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).reshape(8, 1)
    high = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    return (low | high).to(torch.float32).mul_(scales).sub_(minima).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(4, 1)
    high = ((blocks[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4
    values = (low | high).flatten(1).to(torch.float32) - 32
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32) * _half(blocks, 208)
    return values.view(-1, 16, 16).mul_(scales.unsqueeze(2)).flatten(1)


_BLOCKS: Final[Mapping[GGMLQuantizationType, Callable[[Tensor], Tensor]]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
_PLAIN: Final[Mapping[GGMLQuantizationType, torch.dtype]] = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
SUPPORTED_TYPES: Final = frozenset(_BLOCKS) | frozenset(_PLAIN)


def dequantize(data: Tensor, kind: GGMLQuantizationType, dtype: torch.dtype) -> Tensor:
    """data uint8 [bytes] of a tensor of type ``kind`` -> a fresh flat tensor in ``dtype``."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return data.view(plain).to(dtype, copy=True)
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = torch.empty((blocks.shape[0], block_values), dtype=dtype)
    to_float32, slab = _BLOCKS[kind], max(1, _SLAB_VALUES // block_values)
    for start in range(0, blocks.shape[0], slab):
        values[start : start + slab].copy_(to_float32(blocks[start : start + slab]))
    return values.flatten()
