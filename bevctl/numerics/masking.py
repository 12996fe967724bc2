"""Which boolean tensors say where a tensor is not finite: what is selected with one was overwritten on purpose."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bevctl.numerics.ledger import address
from bevctl.numerics.operation import Call

_TESTS = ("aten.isnan.", "aten.isinf.", "aten.isfinite.", "aten.isposinf.", "aten.isneginf.")
_COMPARISONS = ("aten.eq.", "aten.ne.")


class FinitenessTests:
    """Follows the results of isnan, isinf, isfinite, x != x and x == inf through Boolean operations."""

    def __init__(self) -> None:
        self._tests: set[int] = set()

    def note(self, call: Call, result: Any) -> None:
        """Notes whether the result of a call is such a test."""
        if not (isinstance(result, Tensor) and result.dtype is torch.bool):
            return
        if _is_test(call) or self.used_by(call):
            self._tests.add(address(result))
        else:
            self._tests.discard(address(result))

    def used_by(self, call: Call) -> bool:
        """Whether a call reads such a test."""
        return any(address(mask) in self._tests for mask in _booleans([*call.args, *call.kwargs.values()]))


def _is_test(call: Call) -> bool:
    name = call.traits.name
    if name.startswith(_TESTS):
        return True
    if not name.startswith(_COMPARISONS) or len(call.args) < 2:
        return False
    left, right = call.args[:2]
    return left is right or (isinstance(right, float) and not math.isfinite(right))


def _booleans(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.dtype is torch.bool:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _booleans(item)
