"""The tensors that go into a step, by name, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevctl.numerics.expected import Expected, Rule, expected, first_match

MINIMUM_DETERMINANT = 1e-6
"""A 3 × 3 part of a calibration matrix below this maps space onto a plane, a line or a point."""
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class InputFault:
    """Something in a step's data that no model can digest."""

    name: str
    """Such as batch.points[1]."""
    kind: str
    """nonfinite, implausible or degenerate."""
    samples: tuple[int, ...]
    """Positions in the batch."""
    what: str
    """One sentence with numbers."""


@dataclass(frozen=True)
class BatchLayout:
    """How many rows of a tensor's first axis belong to a sample."""

    size: int
    """Samples."""
    views: int = 1
    """Images of a sample."""

    @staticmethod
    def of(batch: Any) -> BatchLayout | None:
        """The layout of an object with a `size` and perhaps (B, N, …) `images`; None for anything else."""
        size, images = getattr(batch, "size", None), getattr(batch, "images", None)
        if not isinstance(size, int):
            return None
        return BatchLayout(size, images.shape[1] if isinstance(images, Tensor) and images.dim() > 3 else 1)

    def samples(self, result: Tensor) -> tuple[int, ...] | None:
        """Samples of which `result` holds something non-finite; None where its first axis is not made of samples."""
        rows = result.shape[0] if result.dim() > 1 else 0
        if rows == 0 or rows not in (self.size, self.size * self.views):
            return None
        bad = (~result.isfinite()).flatten(1).any(1).view(self.size, -1).any(1)
        return tuple(bad.nonzero()[:, 0].tolist())


def named_tensors(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside dataclasses, mappings, lists and tuples, with a name such as batch.boxes[0]."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{index}]")


@torch.no_grad()
def input_faults(batch: Any, name: str = "batch", rules: Expected | None = None) -> list[InputFault]:
    """Non-finite, implausible and degenerate values in a batch, worst kind first for each tensor.

    `batch` is any nest of dataclasses, mappings, lists and tensors. What `rules` (default: the package's) allow, such
    as an unknown velocity, is no fault.
    """
    rules = rules or expected()
    faults: list[InputFault] = []
    for path, tensor in named_tensors(batch, name):
        if tensor.is_floating_point() and tensor.numel():
            faults += _faults(path, tensor, rules)
    return faults


def bad_elements(name: str, tensor: Tensor, rules: Expected) -> Tensor:
    """Flags, of the tensor's shape, of the non-finite elements that no rule allows."""
    bad = ~tensor.isfinite()
    for rule in rules.inputs:
        if rule.matches(name):
            columns = [c for c in rule.columns or range(bad.shape[-1]) if c < bad.shape[-1]]
            bad[..., columns] = False
    return bad


def allowed_reason(name: str, rules: Expected) -> str:
    """Why an input may hold something that is not finite; "" if it may not."""
    rule = first_match(rules.inputs, name)
    return rule.reason if rule is not None else ""


def _faults(name: str, tensor: Tensor, rules: Expected) -> list[InputFault]:
    bad = bad_elements(name, tensor, rules)
    if bad.any():
        return [_fault(name, "nonfinite", bad, f"{_counted(tensor, bad)} in {name}{_places(bad)}")]
    for rule in rules.plausible:
        if rule.matches(name):
            fault = _implausible(name, tensor, rule)
            if fault is not None:
                return [fault]
    return _degenerate(name, tensor) if ".calibration." in name else []


def _implausible(name: str, tensor: Tensor, rule: Rule) -> InputFault | None:
    columns = [c for c in rule.columns or range(tensor.shape[-1]) if c < tensor.shape[-1]]
    too_large = torch.zeros_like(tensor, dtype=torch.bool)
    too_large[..., columns] = tensor[..., columns].abs() > rule.largest
    if not too_large.any():
        return None
    largest = float(tensor[too_large].abs().max())
    what = f"{int(too_large.sum())} values up to {largest:.3g} in {name}{_places(too_large)}: {rule.reason}"
    return _fault(name, "implausible", too_large, what)


def _degenerate(name: str, tensor: Tensor) -> list[InputFault]:
    if tensor.dim() < 3 or tensor.shape[-2:] != (4, 4):
        return []
    flat = torch.linalg.det(tensor[..., :3, :3].double()).abs() < MINIMUM_DETERMINANT
    if not flat.any():
        return []
    what = f"{int(flat.sum())} matrices of {name}{_places(flat)} cannot be inverted"
    return [_fault(name, "degenerate", flat, what)]


def _fault(name: str, kind: str, bad: Tensor, what: str) -> InputFault:
    return InputFault(name, kind, bad_samples(name, bad), what)


def bad_samples(name: str, bad: Tensor) -> tuple[int, ...]:
    """Samples that `bad` elements of an input belong to: the list index in its name, else the first axis."""
    index = _INDEX.search(name)
    if index is not None:
        return (int(index[1]),)
    if bad.dim() == 0:
        return ()
    return tuple(bad.flatten(1).any(1).nonzero()[:, 0].tolist() if bad.dim() > 1 else bad.nonzero()[:, 0].tolist())


def _counted(tensor: Tensor, bad: Tensor) -> str:
    nan = int((tensor.isnan() & bad).sum())
    inf = int(bad.sum()) - nan
    return " and ".join(text for count, text in ((nan, f"{nan} NaN"), (inf, f"{inf} infinite values")) if count)


def _places(bad: Tensor) -> str:
    """Where the first bad element lies, for example " (first at [0, 3])"."""
    return f" (first at {bad.nonzero()[0].tolist()})" if bad.dim() else ""
