"""Which part of a model makes a tensor: hooks that tell a ledger what runs, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from bevctl.engine.stand_in import tensors_in
from bevctl.measure.memory_allocator import tensor_bytes
from bevctl.models.build import PARTS

INPUTS, REST, LOSSES, GRADIENTS = "inputs", "rest", "losses", "gradients"


class Ledger(Protocol):
    """What is told."""

    part: str
    pool: str

    def enter(self, part: str, pool: str = "") -> None:
        """What is born from now on belongs to `part`, and lies in `pool`."""

    def relabel(self, tensor: Tensor, part: str) -> None:
        """The memory of `tensor` counts for `part` from now on."""

    def hold(self, size: int, part: str) -> None:
        """`part` holds `size` bytes more outside of all pools, for good."""


def part_of(name: str) -> str:
    """The part of the model that the module `name` is or belongs to."""
    return next(part for part in PARTS if name == part or name.startswith(f"{part}."))


def watch(model: nn.Module, ledger: Ledger, recorded: Sequence[str]) -> None:
    """Tells the ledger which part runs, forward and backward, and counts what a recorded part holds beside its pool."""
    modules = dict(model.named_modules())
    for name in dict.fromkeys((*PARTS, *recorded)):
        if name in modules:
            _Place(name, modules[name], ledger, pool=name if name in recorded else "")
    for name, parameter in model.named_parameters():
        copied = any(name.startswith(f"{part}.") for part in recorded)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, copied=copied: _gradient(ledger, p, copied))


def _gradient(ledger: Ledger, parameter: Tensor, copied: bool) -> None:
    assert parameter.grad is not None
    ledger.relabel(parameter.grad, GRADIENTS)
    if copied:
        ledger.hold(tensor_bytes(parameter.grad), GRADIENTS)


class _Place:
    """Hooks around a module: what it makes belongs to its part, and to its pool if it has one."""

    def __init__(self, name: str, module: nn.Module, ledger: Ledger, pool: str) -> None:
        self._part = part_of(name)
        self._nested, self._pool, self._ledger = name != self._part, pool, ledger
        self._before: list[tuple[str, str]] = []
        self._seen = False
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, inputs: Any) -> None:
        self._before.append((self._ledger.part, self._ledger.pool))
        self._ledger.enter(self._part, self._pool)
        if self._pool and not self._seen:
            self._hold(tensors_in(inputs))
        if self._nested:
            self._when_gradient_comes(tensors_in(inputs), "")

    def _leave(self, _: nn.Module, __: Any, outputs: Any) -> None:
        self._ledger.enter(*self._before.pop())
        if self._part.startswith("heads."):
            self._ledger.enter(LOSSES)
        if self._pool and not self._seen:
            self._hold(t for t in tensors_in(outputs) if t.requires_grad)
        self._seen = True
        self._when_gradient_comes(tensors_in(outputs), self._pool)

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        """A recording reads copies of its inputs and of its outputs' gradients."""
        self._ledger.hold(sum(tensor_bytes(t) for t in tensors), self._part)

    def _when_gradient_comes(self, tensors: Iterable[Tensor], pool: str) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._ledger.enter(self._part, pool))
