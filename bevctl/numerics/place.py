"""Which module and which line of code an operation belongs to, from the Python stack and from autograd."""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_ENGINE = (str(Path(_TORCH) / "autograd" / "graph.py"), str(Path(_TORCH) / "autograd" / "__init__.py"))


@dataclass(frozen=True)
class Place:
    """Where an operation was called."""

    module: str
    """Name of the innermost module, "" for the model itself or code around it."""
    file: str
    """"" where no code outside torch is on the stack."""
    line: int
    function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "?"


NOWHERE = Place("", "", 0)


class Places:
    """Finds the places of operations in a model; remembers those of the forward pass for the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._owners = {id(p): name for name, m in model.named_modules() for p in m.parameters(recurse=False)}
        self._by_node: dict[int, Place] = {}
        self._sequence: list[int] = []

    def of_forward(self, requires_grad: bool) -> Place:
        """The place of the operation that runs now, noted for the autograd node that it gets."""
        place = self._on_stack()[0]
        if requires_grad:
            number = torch.autograd._get_sequence_nr() - 1
            if number not in self._by_node:
                self._by_node[number] = place
                self._sequence.append(number)
        return place

    def of_backward(self, node: torch.autograd.graph.Node) -> tuple[Place, bool]:
        """The place of an operation inside `node`, and whether it belongs to a forward pass that is done again.

        The line is one inside the backward function where that is Python, else that of the operation which made the
        node; the module is the latter's.
        """
        on_stack, in_module = self._on_stack()
        if in_module:
            return on_stack, True
        made = self._made(node)
        return (Place(made.module, on_stack.file, on_stack.line, on_stack.function) if on_stack.file else made), False

    def _made(self, node: torch.autograd.graph.Node) -> Place:
        """Where the node's operation ran; the node of an in-place operation on a view follows that operation."""
        if node.name().endswith("AccumulateGrad"):
            owner = self._owners.get(id(getattr(node, "variable", None)))
            return NOWHERE if owner is None else Place(owner, "", 0)
        number = node._sequence_nr()
        place = self._by_node.get(number)
        if place is None and number < 2**63:
            position = bisect_right(self._sequence, number)
            place = self._by_node[self._sequence[position - 1]] if position else None
        return place or NOWHERE

    def _on_stack(self) -> tuple[Place, bool]:
        """The innermost module and the innermost line outside torch; and whether there was a module."""
        module: str | None = None
        caller: FrameType | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and (module is None or caller is None):
            kind = _kind(frame.f_code)
            if kind == "engine":
                break
            if kind == "user" and caller is None:
                caller = frame
            if module is None:
                module = self._module(frame)
            frame = frame.f_back
        if caller is None:
            return Place(module or "", "", 0), module is not None
        code = caller.f_code
        return Place(module or "", code.co_filename, caller.f_lineno, code.co_name), module is not None

    def _module(self, frame: FrameType) -> str | None:
        code = frame.f_code
        if not code.co_argcount or code.co_varnames[0] != "self" or code.co_filename.startswith(_HERE):
            return None
        owner = frame.f_locals.get("self")
        return self._names.get(id(owner)) if isinstance(owner, nn.Module) else None


@functools.lru_cache(maxsize=4096)
def _kind(code: CodeType) -> str:
    """engine, torch (also this package) or user."""
    name = code.co_filename
    if name in _ENGINE:
        return "engine"
    return "torch" if name.startswith((_TORCH, _HERE, "<")) else "user"
