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
    along: str = ""
    """Argument that names an axis along which every number must be one."""


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
    "_softmax": Pole("self", lambda x: x == -torch.inf, "softmax of rows in which every entry is masked", along="dim"),
    "_log_softmax": Pole(
        "self", lambda x: x == -torch.inf, "softmax of rows in which every entry is masked", along="dim"
    ),
    "native_batch_norm": Pole("running_var", lambda x: x < 0, "negative running variance"),
    "cudnn_batch_norm": Pole("running_var", lambda x: x < 0, "negative running variance"),
}
_NEEDED = {
    "mean": (1, "mean of no elements"),
    "var": (2, "variance of one element"),
    "std": (2, "deviation of one element"),
}
"""Elements that an operation needs."""


def pole_sentence(call: Call) -> str:
    """Such as "division by zero: 3 of 40", or "" where the inputs are no pole."""
    base, bound = call.traits.name.split(".")[1].removesuffix("_"), call.bound
    needed, lacking = _NEEDED.get(base, (0, ""))
    if needed and bound["self"].numel() < needed:
        return lacking
    pole = _POLES.get(base)
    value: Any = None if pole is None else bound.get(pole.argument)
    if pole is None or not isinstance(value, Tensor):
        return ""
    flags = pole.flags(value.detach())
    if pole.along:
        flags = flags.all(dim=bound[pole.along])
    count = int(flags.sum())
    return f"{pole.words}: {count} of {flags.numel()}" if count else ""
