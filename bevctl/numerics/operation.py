"""What an ATen operation reads and writes, from its schema."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from bevctl.numerics.expected import Rule, expected, first_match

_REPLACES_CONTENT = ("aten.copy_", "aten.zero_", "aten.fill_", "aten.normal_", "aten.uniform_", "aten.bernoulli_")
_OPAQUE_CONSTRUCTORS = ("aten.zeros", "aten.ones", "aten.full", "aten.new_zeros", "aten.new_ones", "aten.new_full")


@dataclass(frozen=True)
class Traits:
    """What is known of an operation before it runs."""

    name: str
    """Such as aten.add_.Tensor."""
    is_view: bool
    """Its result shares memory with its input and computes nothing."""
    written: tuple[str, ...]
    """Names of the arguments that it writes to."""
    replaced: tuple[str, ...]
    """Those among them whose content before does not matter."""
    arguments: tuple[str, ...]
    """Names of all arguments, positional ones first."""
    uninitialised: bool
    """Its result has no meaning yet."""
    constructor: bool
    """Its result is often filled by a kernel that torch does not see."""
    masking: Rule | None
    """Why it may swallow what is not finite."""
    output_rules: tuple[Rule, ...]
    """Which of its outputs may be anything."""


@functools.cache
def traits_of(func: OpOverload) -> Traits:
    """The traits of an operation."""
    schema, name, rules = func._schema, str(func), expected()
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    out_only = tuple(a.name for a in schema.arguments if a.name in written and a.is_out)
    replaces = name.startswith(_REPLACES_CONTENT)
    constructors = tuple(f"{prefix}{suffix}" for prefix in _OPAQUE_CONSTRUCTORS for suffix in (".", "_like."))
    return Traits(
        name=name,
        is_view=not written and any(r.alias_info is not None for r in schema.returns),
        written=written,
        replaced=written if replaces else out_only,
        arguments=tuple(a.name for a in schema.arguments),
        uninitialised=first_match(rules.uninitialised, name) is not None,
        constructor=name.startswith(constructors),
        masking=first_match(rules.masking, name),
        output_rules=tuple(rule for rule in rules.outputs if rule.matches(name)),
    )


def bound_arguments(traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, value) of every argument that was given."""
    yield from zip(traits.arguments, args, strict=False)
    yield from kwargs.items()


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The plain floating-point tensors in an argument or result: itself, or the items of a list."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout is torch.strided and value.dtype.itemsize > 1:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating_tensors(item)


def has_nonfinite_constant(value: Any) -> bool:
    """Whether an argument is a Python number, or a list with one, that is not finite: somebody meant it."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, list | tuple) and any(has_nonfinite_constant(item) for item in value)
