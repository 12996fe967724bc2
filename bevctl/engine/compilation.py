"""torch.compile for the parts of a model whose shapes never change, each proven against itself before it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

Report = Callable[[str], None]
"""Takes a sentence for whoever watches the run."""
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 8e-2, torch.float32: 2e-3}
"""Largest relative error (L2) of outputs and gradients: kernels that fuse differently also round differently."""
# Random draws must be those of the uncompiled model, and a later start must find what this one compiled.
_INDUCTOR_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True, "fx_graph_cache": True}


def compile_parts(model: nn.Module, names: Iterable[str], report: Report, backend: Any = "inductor") -> list[str]:
    """Lets the modules of `model` called `names`, as far as it has them, run compiled while they train.

    Their `forward` is wrapped in place; names of parameters stay. Returns the names found.
    """
    modules = dict(model.named_modules())
    found = [name for name in names if name in modules]
    for name in found:
        modules[name].forward = CompiledForward(name, modules[name], report, backend)
    return found


class CompiledForward:
    """A module's forward, compiled in training; evaluation and traces run the module as it is.

    The first call runs forward and backward pass both ways. A compiler that fails or gives other numbers is reported,
    and from then on the module runs as it is.
    """

    def __init__(self, name: str, module: nn.Module, report: Report, backend: Any = "inductor") -> None:
        self.name, self.module, self.report = name, module, report
        self.plain = module.forward
        options = _INDUCTOR_OPTIONS if backend == "inductor" else None
        self.compiled: Callable[..., Any] | None = torch.compile(
            self.plain, dynamic=False, backend=backend, options=options
        )
        self.proven = False

    def __call__(self, *inputs: Any) -> Any:
        if self.compiled is None or not self._in_training():
            return self.plain(*inputs)
        if not self.proven:
            self._prove(inputs)
        return self.plain(*inputs) if self.compiled is None else self.compiled(*inputs)

    def _in_training(self) -> bool:
        # A dispatch mode watches single operations, which compiled code does not have.
        return self.module.training and torch.is_grad_enabled() and _get_current_dispatch_mode() is None

    def _prove(self, inputs: Sequence[Any]) -> None:
        expected = self._trial(self.plain, inputs)
        try:
            assert self.compiled is not None
            worst = _largest_error(self._trial(self.compiled, inputs), expected)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler fails in its own ways
            reason = " ".join(str(error).split("\n")[:2])  # dynamo names itself first, and then the cause
            self._give_up(f"{type(error).__name__}: {reason}")
            return
        self.proven = True
        if worst is not None:
            self._give_up(worst)

    def _give_up(self, reason: str) -> None:
        self.compiled = None
        self.report(f"{self.name} runs without torch.compile: {reason}")

    def _trial(self, forward: Callable[..., Any], inputs: Sequence[Any]) -> list[Tensor]:
        """Outputs and gradients of `forward`; leaves gradients, statistics and random states as they were."""
        copies = _detached(inputs)
        leaves = [t for t in _tensors(copies) if t.requires_grad]
        leaves += [p for p in self.module.parameters() if p.requires_grad]
        with torch.random.fork_rng(_devices(leaves)), _buffers_kept(self.module):
            outputs = [t for t in _tensors(forward(*copies)) if t.requires_grad]
            gradients = torch.autograd.grad(outputs, leaves, [t.detach() for t in outputs], allow_unused=True)
        torch.clear_autocast_cache()  # it holds halves of weights that belong to this trial's graph
        return [t.detach() for t in (*outputs, *gradients) if t is not None]


@contextlib.contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)


def _largest_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """What is wrong with the tensors that differ from `expected` by more than rounding, if any do."""
    if [t.shape for t in found] != [t.shape for t in expected]:
        return "it returns other shapes"
    scale = max((float(t.float().norm()) / max(t.numel(), 1) ** 0.5 for t in expected), default=0.0)
    for ours, reference in zip(found, expected, strict=True):
        norm = float(reference.float().norm())
        negligible = norm <= 1e-4 * scale * reference.numel() ** 0.5
        error = float((ours.float() - reference.float()).norm()) / max(norm, 1e-30)
        if not negligible and not error <= _TOLERANCE.get(reference.dtype, 1e-3):
            return f"its numbers are off by {error:.1%}"
    return None


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return [_detached(item) for item in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list({t.device for t in tensors if t.device.type == "cuda"})
