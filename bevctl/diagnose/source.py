"""What a model's source code does that matters in half precision: files are parsed, never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bevctl.config.foreign_expressions import parse
from bevctl.errors import BevctlError
from bevctl.preflight.half_weights import MAX_BYTES, python_sources

SMALLEST_FP16 = 2.0**-24
"""Smallest positive number of FP16; half of it, and less, rounds to 0."""
LARGEST_FP16 = 65504.0
HIDES, VANISHES, OVERFLOWS, KEPT_FP32, IN_FP16 = "hides", "vanishes", "overflows", "kept in FP32", "in FP16"
_REPLACING = {"nan_to_num", "nan_to_num_", "nansum", "nanmean", "nanmedian"}
_TESTS = {"isnan", "isfinite", "isinf"}
_FP32_MARKS = {"force_fp32"}
_FP16_MARKS = {"auto_fp16", "autocast"}
_WORDS = (*_REPLACING, *_TESTS, *_FP32_MARKS, *_FP16_MARKS, "eps", "1e-", "inverse_sigmoid", "fp16_enabled")
"""One of them, or the pattern below, is in every file that has something to find."""
_UNEQUAL_TO_ITSELF = re.compile(r"\b(\w+) != \1\b")
_SMALL_IN = {"log", "sqrt", "rsqrt", "div", "clamp", "clamp_", "clamp_min", "clip", "normalize", "reciprocal"}


@dataclass(frozen=True)
class Passage:
    """A place in the code."""

    path: Path
    line: int
    kind: str
    """HIDES: puts numbers where NaN was; VANISHES: a constant that is 0 in FP16; OVERFLOWS: a quotient above FP16's
    range; KEPT_FP32 and IN_FP16: marks of what runs in which format."""
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def scan_source(root: Path) -> list[Passage]:
    """Every passage below `root` (a folder or one file), by file and line; a file that does not parse is left out.

    Raises:
        BevctlError: there is no `root`.
    """
    if not root.exists():
        raise BevctlError(f"--source {root} does not exist.", "Give the folder of the model's code.")
    files = [root] if root.is_file() else list(python_sources(root))
    return [passage for path in files for passage in _passages(path)]


def _passages(path: Path) -> list[Passage]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
        if not any(word in text for word in _WORDS) and not _UNEQUAL_TO_ITSELF.search(text):
            return []
        tree = parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # what cannot be read or parsed cannot be imported by the run either
    found = {
        (node.lineno, kind): Passage(path, node.lineno, kind, _shown(node))
        for node in ast.walk(tree)
        for look in _LOOKS
        for node, kind in look(node)
    }
    return [found[place] for place in sorted(found)]


Place = tuple[ast.expr | ast.stmt, str]


def _replacing(node: ast.AST) -> Iterator[Place]:
    """`nan_to_num(x)`; `where`, `masked_fill` and an assignment to items chosen by `isnan`."""
    if isinstance(node, ast.Call):
        name = _called(node)
        if name in _REPLACING or (name in ("where", "masked_fill", "masked_fill_") and _tests(node.args[:1])):
            yield node, HIDES
    elif isinstance(node, ast.Assign):
        targets = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        if _tests(targets):
            yield node, HIDES


def _skipping(node: ast.AST) -> Iterator[Place]:
    """`if torch.isnan(loss): continue`, or one that returns or sets a constant."""
    if isinstance(node, ast.If) and _tests([node.test]):
        for statement in node.body:
            constant = isinstance(statement, ast.Assign) and not isinstance(statement.value, ast.Name)
            if isinstance(statement, ast.Continue | ast.Return) or constant:
                yield statement, HIDES
                return


def _tests(nodes: list[ast.expr]) -> bool:
    """Whether NaN is asked for: isnan and the like, or `x != x`."""
    for inner in (inner for node in nodes for inner in ast.walk(node)):
        if isinstance(inner, ast.Call) and _called(inner) in _TESTS:
            return True
        if isinstance(inner, ast.Compare) and _is_unequal_to_itself(inner):
            return True
    return False


def _is_unequal_to_itself(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], ast.NotEq) and ast.dump(node.left) == ast.dump(node.comparators[0])


def _vanishing(node: ast.AST) -> Iterator[Place]:
    """A guard against zero that FP16 rounds to zero: `log(x + 1e-12)`, `clamp(min=1e-9)`, `eps=1e-8`."""
    guarded: list[ast.expr] = []
    if isinstance(node, ast.Call) and _called(node) in _SMALL_IN:
        guarded = [*node.args, *(keyword.value for keyword in node.keywords)]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        guarded = [node.right]
    if isinstance(node, ast.expr) and any(_is_small(inner) for part in guarded for inner in ast.walk(part)):
        yield node, VANISHES


def _is_small(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value <= SMALLEST_FP16 / 2


def _overflowing(node: ast.AST) -> Iterator[Place]:
    """`def inverse_sigmoid(x, eps=1e-5)`: x / eps and its derivative leave FP16."""
    if isinstance(node, ast.FunctionDef) and "inverse_sigmoid" in node.name:
        values = [default.value for default in node.args.defaults if isinstance(default, ast.Constant)]
        if any(isinstance(value, float) and 0 < value < 1 / LARGEST_FP16 for value in values):
            yield node, OVERFLOWS


def _marks(node: ast.AST) -> Iterator[Place]:
    """Decorators and context managers that choose a format."""
    if isinstance(node, ast.FunctionDef):
        for decorator in node.decorator_list:
            name = _called(decorator) if isinstance(decorator, ast.Call) else _last_name(decorator)
            if name in _FP32_MARKS | _FP16_MARKS:
                yield decorator, KEPT_FP32 if name in _FP32_MARKS else IN_FP16
    elif isinstance(node, ast.With):
        for item in node.items:
            call = item.context_expr
            if isinstance(call, ast.Call) and _called(call) == "autocast":
                yield call, KEPT_FP32 if _is_off(call) else IN_FP16


def _is_off(call: ast.Call) -> bool:
    """Whether `autocast(…)` switches half precision off."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "enabled")]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


_LOOKS: tuple[Callable[[ast.AST], Iterator[Place]], ...] = (_replacing, _skipping, _vanishing, _overflowing, _marks)


def _called(call: ast.Call) -> str:
    return _last_name(call.func)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _shown(node: ast.AST) -> str:
    text = f"def {node.name}(…)" if isinstance(node, ast.FunctionDef) else ast.unparse(node)
    return " ".join(text.split())[:100]
