"""Elementary functions whose bits depend on the argument alone, not on its place in a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def exp(x: Tensor) -> Tensor:
    """float32 -> float32, to about 1 unit in the last place: 2^n * p(r) with x = n ln 2 + r (Cody and Waite).

    Made of additions and multiplications alone, because a library's exponential may take one path for most of a tensor
    and another for what is left over at its end, and then a value's bits depend on its place.
    """
    clamped = x.clamp(-104.0, 88.72)
    n = torch.round(clamped * 1.4426950408889634)
    r = clamped - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + coefficient
    p = p * (r * r) + r + 1.0
    # In two factors, since 2^n may be too small for a normal number.
    half = torch.floor(n / 2)
    result = p * _power_of_two(half) * _power_of_two(n - half)
    return torch.where(x < -104.0, torch.zeros_like(result), torch.where(x.isnan(), x, result))


def _power_of_two(n: Tensor) -> Tensor:
    return ((n.nan_to_num().to(torch.int32) + 127) << 23).view(torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """float32 -> float32."""
    return 1.0 / (1.0 + exp(-x))
