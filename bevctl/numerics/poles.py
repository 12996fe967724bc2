"""Which inputs an operation cannot take, so that a fault in every number format can be said in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevctl.numerics.operation import Call

EXP_LIMIT = 88.0
"""exp of more overflows FP32."""


@dataclass(frozen=True)
class Pole:
    """Numbers of one argument where an operation has no finite value."""

    argument: str
    flags: Callable[[Tensor], Tensor]
    words: str


_POLES = {
    "log": Pole("self", lambda x: x <= 0, "logarithm of zero or less"),
    "log2": Pole("self", lambda x: x <= 0, "logarithm of zero or less"),
    "log10": Pole("self", lambda x: x <= 0, "logarithm of zero or less"),
    "log1p": Pole("self", lambda x: x <= -1, "logarithm of zero or less"),
    "div": Pole("other", lambda x: x == 0, "division by zero"),
    "reciprocal": Pole("self", lambda x: x == 0, "division by zero"),
    "sqrt": Pole("self", lambda x: x < 0, "square root of a negative number"),
    "rsqrt": Pole("self", lambda x: x <= 0, "reciprocal square root of zero or less"),
    "pow": Pole("self", lambda x: x <= 0, "power of zero or less"),
    "exp": Pole("self", lambda x: x > EXP_LIMIT, "exponential beyond the format"),
    "expm1": Pole("self", lambda x: x > EXP_LIMIT, "exponential beyond the format"),
    "acos": Pole("self", lambda x: x.abs() > 1, "arc cosine beyond 1"),
    "asin": Pole("self", lambda x: x.abs() > 1, "arc sine beyond 1"),
    "atanh": Pole("self", lambda x: x.abs() >= 1, "hyperbolic arc tangent at or beyond 1"),
    "logit": Pole("self", lambda x: (x <= 0) | (x >= 1), "logit at or beyond 0 or 1"),
    "_softmax": Pole("self", lambda x: x == -torch.inf, "softmax of a row in which every entry is masked"),
    "_log_softmax": Pole("self", lambda x: x == -torch.inf, "softmax of a row in which every entry is masked"),
    "native_batch_norm": Pole("running_var", lambda x: x < 0, "negative running variance"),
    "cudnn_batch_norm": Pole("running_var", lambda x: x < 0, "negative running variance"),
    "mean": Pole("self", lambda x: torch.tensor(x.numel() == 0), "mean of no elements"),
    "var": Pole("self", lambda x: torch.tensor(x.numel() < 2), "variance of fewer than two elements"),
    "std": Pole("self", lambda x: torch.tensor(x.numel() < 2), "deviation of fewer than two elements"),
}


def pole_sentence(call: Call) -> str:
    """Such as "division by zero: 3 of 40 elements of other", or "" where the inputs are no pole."""
    base = call.traits.name.split(".")[1].removesuffix("_")
    pole = _POLES.get(base)
    if pole is None:
        return ""
    value: Any = call.bound.get(pole.argument)
    if not isinstance(value, Tensor):
        return pole.words if value == 0 and base == "div" else ""
    flags = pole.flags(value.detach())
    count = int(flags.sum())
    return f"{pole.words}: {count} of {value.numel()} elements" if count else ""
