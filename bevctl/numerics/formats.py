"""The limits of FP16, which are what a mixed-precision run runs into. IEEE 754-2008, binary16."""

from __future__ import annotations

import torch

FP16_MAX = 65504.0
SATURATED = 0.9 * FP16_MAX
"""Magnitudes above this are one small change away from overflow."""
SMALLEST_EXPONENT = -14
"""Values below 2^-14 are subnormal: they lose bits."""
FLUSHED_EXPONENT = -25
"""Values below 2^-25 round to zero."""
HALF = (torch.float16, torch.bfloat16)


def short_name(dtype: torch.dtype) -> str:
    """`torch.float16` → float16."""
    return str(dtype).removeprefix("torch.")


def wider(dtype: torch.dtype) -> torch.dtype:
    """The format in which a result of `dtype` is checked: FP32 for half precision, FP64 for FP32."""
    return torch.float32 if dtype in HALF else torch.float64
