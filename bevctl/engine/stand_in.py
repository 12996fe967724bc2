"""A faster form of a module that takes its place in training, once it has been proven against the module itself."""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from bevctl.errors import BevctlError

Report = Callable[[str], None]
"""Takes a sentence for whoever watches the run."""
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 5e-3}
"""Largest relative error (L2) of outputs and gradients: what fuses differently also rounds differently, and float32
products may use TF32."""


class StandIn(ABC):
    """Takes the place of a module's `forward`; evaluation and traces run the module as it is.

    The first call runs forward and backward pass both ways. A stand-in that fails or gives other numbers is reported,
    and from then on the module runs as it is.
    """

    kind: str
    """What the module runs without when the stand-in failed."""

    def __init__(self, name: str, module: nn.Module, report: Report) -> None:
        self.name, self.module, self.report = name, module, report
        self.plain: Callable[..., Any] = module.forward
        self.usable = True
        self._proven = False

    def __call__(self, *inputs: Any) -> Any:
        if not self.usable or not self._in_training():
            return self.plain(*inputs)
        if not self._proven:
            self._prove(inputs)
        return self.run(*inputs) if self.usable else self.plain(*inputs)

    @abstractmethod
    def run(self, *inputs: Any) -> Any:
        """The module's forward in its faster form."""

    def _in_training(self) -> bool:
        # A dispatch mode watches single operations, which a stand-in does not have.
        return self.module.training and torch.is_grad_enabled() and _get_current_dispatch_mode() is None

    def _prove(self, inputs: Sequence[Any]) -> None:
        self._proven = True
        expected = self._trial(self.plain, inputs)
        try:
            wrong = difference(self._trial(self.run, inputs), expected, _compute_dtype(self.module))
        except (torch.cuda.OutOfMemoryError, BevctlError):
            raise
        except Exception as error:  # compilers and recorders fail in ways of their own
            reason = " ".join(str(error).split("\n")[:2])
            wrong = f"{type(error).__name__}: {reason}"
        if wrong is not None:
            self.usable = False
            self.report(f"{self.name} runs without {self.kind}: {wrong}")

    def _trial(self, forward: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
        """Outputs and gradients of `forward`; leaves gradients, statistics and random states as they were."""
        copies = detached(inputs)
        leaves = [t for t in tensors_in(copies) if t.requires_grad]
        leaves += [p for p in self.module.parameters() if p.requires_grad]
        with state_kept(self.module), without_cast_cache():
            outputs = [t for t in tensors_in(forward(*copies)) if t.requires_grad]
            # Neither overflow nor underflow in half precision.
            weights = [t.detach() * max(t.numel(), 1) ** -0.5 for t in outputs]
            gradients = gradients_of(outputs, leaves, weights)
        return [t.detach() for t in (*outputs, *gradients) if t is not None]


def _compute_dtype(module: nn.Module) -> torch.dtype:
    """Number format that a module computes in: gradients of its float32 weights are no more exact than that."""
    device = next((tensor.device.type for tensor in (*module.parameters(), *module.buffers())), "cpu")
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def difference(
    found: Sequence[Tensor], expected: Sequence[Tensor], computed_in: torch.dtype = torch.float32
) -> str | None:
    """What is wrong with tensors that differ from `expected` by more than rounding; None if nothing is."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "it returns other shapes"
    references = [t.float().nan_to_num() for t in expected]
    typical = max((float(t.norm()) / max(t.numel(), 1) ** 0.5 for t in references), default=0.0)
    for ours, reference in zip(found, references, strict=True):
        norm = float(reference.norm())
        error = float((ours.float().nan_to_num() - reference).norm()) / max(norm, 1e-30)
        # Sums that cancel, as gradients of a bias before a norm, are nothing but rounding.
        negligible = norm <= 1e-4 * typical * reference.numel() ** 0.5
        if not negligible and error > max(_TOLERANCE.get(dtype, 1e-3) for dtype in (ours.dtype, computed_in)):
            return f"its numbers are off by {error:.1%}"
    return None


@contextlib.contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Puts the buffers of `module` and the random states back as they were before the block."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {buffer.device for buffer in (*module.parameters(), *module.buffers()) if buffer.is_cuda}
    try:
        with torch.random.fork_rng(list(devices)):
            yield
    finally:
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)


@contextlib.contextmanager
def without_cast_cache() -> Iterator[None]:
    """Autocast rounds weights anew inside the block: its cache would hand tensors of one graph to another."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def gradients_of(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of leaves as the backward pass of a training step computes them, outside of autocast.

    Inside, a product that belongs to a module in FP32 would be rounded, and its rounded weights kept for the whole
    step: threads of the backward pass have a cache of their own, whatever this one says. A recording would then read
    weights of its first step, or memory that is used for something else by now.
    """
    device = next((t.device.type for t in outputs), "cpu")
    with torch.autocast(device, enabled=False):
        return torch.autograd.grad(outputs, leaves, weights, allow_unused=True)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with its tensors, in the order of `tensors_in`, replaced by `tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, list | tuple):
        items = [with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: with_tensors(getattr(value, name), tensors) for name in names})
    return value


def detached(value: Any) -> Any:
    """`value` with tensors that share memory with its own, and are leaves."""
    leaves = (t.detach().requires_grad_(t.requires_grad) for t in tensors_in(value))
    return with_tensors(value, iter(list(leaves)))
