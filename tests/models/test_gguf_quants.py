"""Dequantising against the ``gguf`` library, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from metrale_async.models import gguf_quants
from metrale_async.models.gguf_quants import SUPPORTED_TYPES, dequantize

_PLAIN = (Type.F32, Type.F16, Type.BF16)
# Byte offsets of the float16 scales in a block; everything else in a block may be any byte.
_SCALE_OFFSETS = {
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}


def random_rows(kind: Type, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row] of arbitrary blocks with finite scales."""
    rng = np.random.default_rng(seed)
    if kind in _PLAIN:
        values = rng.normal(size=(rows, blocks)).astype(np.float32)
        return gguf.quantize(values, kind).view(np.uint8).reshape(rows, -1)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    for offset in _SCALE_OFFSETS[kind]:
        scales = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[:, :, offset : offset + 2] = scales.view(np.uint8)
    return data.reshape(rows, -1)


def test_the_supported_types_are_the_documented_ones() -> None:
    assert set(SUPPORTED_TYPES) == {*_PLAIN, *_SCALE_OFFSETS}


@pytest.mark.parametrize("kind", sorted(SUPPORTED_TYPES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_equal_those_of_the_gguf_library(kind: Type, dtype: torch.dtype) -> None:
    data = random_rows(kind, rows=17, blocks=3)
    expected = torch.from_numpy(gguf.dequantize(data, kind).astype(np.float32).reshape(-1)).to(dtype)
    values = dequantize(torch.from_numpy(data).flatten(), kind, dtype)
    assert values.dtype is dtype
    assert torch.equal(values, expected)


def test_a_tensor_larger_than_one_slab_is_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.from_numpy(random_rows(Type.Q5_K, rows=1, blocks=10)).flatten()
    whole = dequantize(data, Type.Q5_K, torch.float32)
    for slab_blocks in (1, 3, 9, 10, 11):
        monkeypatch.setattr(gguf_quants, "_SLAB_VALUES", slab_blocks * 256)
        assert torch.equal(dequantize(data, Type.Q5_K, torch.float32), whole)


@pytest.mark.parametrize("kind", [Type.F32, Type.BF16, Type.Q8_0], ids=lambda kind: kind.name)
def test_the_result_shares_no_memory_with_the_file(kind: Type) -> None:
    data = torch.from_numpy(random_rows(kind, rows=1, blocks=4)).flatten()
    values = dequantize(data, kind, torch.float32 if kind is Type.F32 else torch.bfloat16)
    before = values.clone()
    data.zero_()
    assert torch.equal(values, before)
