"""torch.compile for the parts of a model whose shapes never change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from bevctl.engine.stand_in import Report, StandIn, without_cast_cache

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


class CompiledForward(StandIn):
    """A module's forward through torch.compile."""

    kind = "torch.compile"

    def __init__(self, name: str, module: nn.Module, report: Report, backend: Any = "inductor") -> None:
        super().__init__(name, module, report)
        options = _INDUCTOR_OPTIONS if backend == "inductor" else None
        self._compiled = torch.compile(self.plain, dynamic=False, backend=backend, options=options)

    def run(self, *inputs: Any) -> Any:
        # Compiled code rounds weights itself, and would be compiled anew for a recording, which has no cache either.
        with without_cast_cache():
            return self._compiled(*inputs)
