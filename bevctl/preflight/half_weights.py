"""Finding calls that turn a model's own weights into FP16 in the source of a training project."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bevctl.config.foreign_expressions import parse

MODEL_WORDS = ("model", "net", "network", "detector", "backbone", "head", "module", "encoder", "decoder")
_SKIPPED_FOLDERS = ("data", "datasets", "work_dirs", "runs", "docs", "tests", "test", "demo", "node_modules", "build")
_NOT_TRAINING = ("test", "eval", "export", "infer", "demo", "benchmark", "deploy", "onnx")
MAX_FILES = 5000
MAX_BYTES = 2**20


@dataclass(frozen=True)
class HalfCall:
    """One call such as `model.half()`."""

    path: Path
    line: int
    text: str


def find(root: Path) -> list[HalfCall]:
    """Every `.half()` on something named like a model in the training code below `root`; files are parsed, never run.

    Code for tests, export and inference is left out: half weights are right there.
    """
    calls = [call for path in python_sources(root) for call in _calls(path)]
    return sorted(calls, key=lambda call: (str(call.path), call.line))


def python_sources(root: Path) -> Iterator[Path]:
    """Training code below `root`, at most MAX_FILES files; data, tests, export and inference are left out."""
    seen = 0
    for folder, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in _SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(".py") and not any(word in name for word in _NOT_TRAINING):
                seen += 1
                if seen > MAX_FILES:
                    return
                yield Path(folder, name)


def _calls(path: Path) -> Iterator[HalfCall]:
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return
        source = path.read_text(encoding="utf-8", errors="replace")
        tree = parse(source) if ".half(" in source else None
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # what cannot be read or parsed cannot be imported by the run either
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "half":
            receiver = _last_name(node.func.value)
            if not node.args and receiver.lower().endswith(MODEL_WORDS):
                yield HalfCall(path, node.lineno, f"{receiver}.half()")


def _last_name(node: ast.expr) -> str:
    """ "model" of `self.model`, `model` and `model.cuda()`."""
    while isinstance(node, ast.Call):
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
