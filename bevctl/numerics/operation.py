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

_REPLACE_CONTENT = ("aten.copy_", "aten.zero_", "aten.fill_", "aten.normal_", "aten.uniform_", "aten.bernoulli_")
_CONSTRUCTORS = ("aten.zeros", "aten.ones", "aten.full", "aten.new_zeros", "aten.new_ones", "aten.new_full")


@dataclass(frozen=True)
class Traits:
    """What is known of an operation before it runs."""

    name: str
    """Such as aten.add_.Tensor."""
    arguments: tuple[str, ...]
    """Names of all arguments, positional ones first."""
    is_view: bool
    """Its result shares memory with its input; nothing is computed."""
    written: tuple[str, ...]
    """Names of the arguments that it writes to."""
    replaced: tuple[str, ...]
    """Those among them whose content before does not matter."""
    uninitialised: Rule | None
    """Why its result has no meaning yet."""
    constructor: bool
    """Its result is a constant, often filled later by a kernel that torch does not see."""
    masking: Rule | None
    """Why it may hide what is not finite."""
    unfinished: tuple[Rule, ...]
    """Which of its outputs may hold anything."""
    unread: tuple[Rule, ...]
    """Which of its arguments it does not use."""


@functools.cache
def traits_of(func: OpOverload) -> Traits:
    """The traits of an operation."""
    schema, name, rules = func._schema, str(func), expected()
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    outs = tuple(a.name for a in schema.arguments if a.is_out)
    return Traits(
        name=name,
        arguments=tuple(a.name for a in schema.arguments),
        is_view=not written and any(r.alias_info is not None for r in schema.returns),
        written=written,
        replaced=written if name.startswith(_REPLACE_CONTENT) else outs,
        uninitialised=first_match(rules.uninitialised, name),
        constructor=name.startswith(_CONSTRUCTORS),
        masking=first_match(rules.masking, name),
        unfinished=tuple(rule for rule in rules.outputs if rule.matches(name)),
        unread=tuple(rule for rule in rules.unread if rule.matches(name)),
    )


@dataclass(frozen=True)
class Call:
    """An operation and its arguments."""

    func: OpOverload
    traits: Traits
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def bound(self) -> dict[str, Any]:
        """Every argument that was given, by name."""
        return bound_arguments(self.traits, self.args, self.kwargs)

    def kept(self) -> Call:
        """The same call, to be made again later: with copies of the tensors that it both reads and overwrites.

        Lists of tensors that are updated together, as optimizers do, are not copied.
        """
        overwritten = [name for name in self.traits.written if name not in self.traits.replaced]
        if not overwritten:
            return self

        def copied(name: str, value: Any) -> Any:
            return value.clone() if name in overwritten and isinstance(value, Tensor) else value

        args = tuple(copied(n, v) for n, v in zip(self.traits.arguments, self.args, strict=False))
        return Call(self.func, self.traits, args, {name: copied(name, value) for name, value in self.kwargs.items()})

    def detached(self) -> Call:
        """The same call on other handles of the same memory, so that autograd still owns its tensors alone."""
        return Call(self.func, self.traits, _detached(self.args), {k: _detached(v) for k, v in self.kwargs.items()})

    def read(self) -> list[Tensor]:
        """The floating-point inputs that it uses."""
        bound = self.bound
        unused = set(self.traits.replaced)
        for rule in self.traits.unread:
            if not any(bound.get(flag) is False for flag in rule.unless):
                unused.update(rule.arguments)
        return [t for name, value in bound.items() if name not in unused for t in floating_tensors(value)]

    def constants(self) -> Iterator[float]:
        """The Python numbers among the arguments."""
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, float):
                    yield item

    @property
    def asks_for_nonfinite(self) -> bool:
        """Whether a number among the arguments is not finite: somebody meant it."""
        return any(not math.isfinite(number) for number in self.constants())


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(_detached(item) for item in value) if type(value) in (list, tuple) else value


def written_tensors(traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Tensor]:
    """The floating-point tensors that an operation returned or wrote into, each once."""
    bound = bound_arguments(traits, args, kwargs)
    into = [tensor for name in traits.written for tensor in floating_tensors(bound.get(name))]
    return list({id(tensor): tensor for tensor in (*floating_tensors(result), *into)}.values())


def bound_arguments(traits: Traits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument that was given, by name."""
    return dict(zip(traits.arguments, args, strict=False)) | dict(kwargs)


def floating_tensors(value: Any) -> Iterator[Tensor]:
    """The plain floating-point tensors in an argument or result: itself, or the items of a list."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.layout is torch.strided and value.dtype.itemsize > 1:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floating_tensors(item)
