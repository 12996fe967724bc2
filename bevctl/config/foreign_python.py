"""Configs of mmcv and mmengine, which are Python files: read statement by statement, never run.

`_base_` files are merged from left to right, then the file over them; `read_base()` imports of mmengine's newer style
are followed where they are relative. What cannot be worked out becomes an `Unresolved` value.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bevctl.config.document import display, read_bytes
from bevctl.config.foreign_expressions import CannotResolve, Evaluator, bound, parse
from bevctl.config.foreign_refusals import refuse_code
from bevctl.config.foreign_values import Section, Unresolved, merged
from bevctl.config.layers import Origin
from bevctl.errors import BevctlError

_MAX_FILES = 60
_MAX_ROUNDS = 1000
"""Rounds of a `for` that are followed."""
_QUOTED_BASE = re.compile(r"""(['"])\{\{\s*(_base_(?:\.\w+)+)\s*\}\}\1""")
_BARE_BASE = re.compile(r"\{\{\s*(_base_(?:\.\w+)+)\s*\}\}")
_ENVIRONMENT = re.compile(r"\{\{\s*\$\w+:([^}]*?)\s*\}\}")
_PREDEFINED = re.compile(r"\{\{\s*(fileDirname|fileBasename|fileBasenameNoExtname|fileExtname)\s*\}\}")


class Reading:
    """One config file and those below it, while they are read."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        """Every file that was read, bases first."""
        self.notes: list[str] = []
        self.lazy = False
        """Bases or classes are imported, which is mmengine's newer style."""
        self.imported: dict[Path, dict[str, Unresolved]] = {}
        """File → what it imports from packages; `import *` of the file passes these names on."""
        self._open: list[Path] = []

    def read(self, path: Path) -> Section:
        """The config of a file with its bases. Raises BevctlError that names file and line."""
        resolved = _resolve(path)
        where = display(path)
        if resolved in self._open:
            raise BevctlError(f"{where} is among its own bases.", "Take it out of _base_ in one of these files.")
        if len(self.files) + len(self._open) >= _MAX_FILES:
            raise BevctlError(f"{where} has more than {_MAX_FILES} bases.", "Give a config with fewer.")
        self._open.append(resolved)
        values = self.read_dump(_substituted(read_text(path), path), path)
        self._open.pop()
        self.files.append(path)
        return values

    def read_dump(self, text: str, path: Path) -> Section:
        """The config whose `text` stands in another file, `path`. Raises BevctlError that names file and line."""
        file = _File(path, self, _parse(text, display(path)))
        values = file.values()
        self.imported[path] = file.imported()
        return values


def _resolve(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path


def read_text(path: Path) -> str:
    """The text of a config file. Raises BevctlError for one that cannot be read, is too large or no UTF-8."""
    try:
        return read_bytes(path).decode()
    except ValueError:
        raise BevctlError(f"{display(path)} is not text in UTF-8.", "A config is a text file.") from None


def _substituted(text: str, path: Path) -> str:
    """The text with mmcv's {{ }} replaced: file names by themselves, references to a base by expressions."""
    names = {
        "fileDirname": str(path.parent),
        "fileBasename": path.name,
        "fileBasenameNoExtname": path.stem,
        "fileExtname": path.suffix,
    }
    text = _PREDEFINED.sub(lambda match: names[match[1]], text)
    text = _ENVIRONMENT.sub(lambda match: match[1], text)
    return _BARE_BASE.sub(r"\1", _QUOTED_BASE.sub(r"\2", text))


def _parse(text: str, where: str) -> ast.Module:
    try:
        tree = parse(text)
    except SyntaxError as error:
        raise BevctlError(f"{where}:{error.lineno}: not valid Python: {error.msg}.", "Fix the line.") from None
    except (ValueError, RecursionError, MemoryError):
        raise BevctlError(f"{where} cannot be parsed as Python.", "Give an mmcv or mmengine config.") from None
    assert isinstance(tree, ast.Module)
    refuse_code(tree, where)
    return tree


class _File:
    """The statements of one file."""

    def __init__(self, path: Path, reading: Reading, tree: ast.Module) -> None:
        self._path = path
        self._reading = reading
        self._where = display(path)
        self._tree = tree
        self._base = Section()
        self._own = Section()
        self._names: dict[str, Any] = {"_base_": self._base}
        self._evaluator = Evaluator(self._names, self._origin)

    def _origin(self, line: int) -> Origin:
        return Origin("file", self._where, line)

    def values(self) -> Section:
        for path in self._base_files():
            self._merge_base(self._reading.read(path))
        self._run(self._tree.body)
        return merged(self._base, self._own)

    def imported(self) -> dict[str, Unresolved]:
        """Names that stand for something of a package."""
        return {name: value for name, value in self._names.items() if isinstance(value, Unresolved)}

    def _merge_base(self, values: Section) -> None:
        for key in self._base.keys() & values.keys():
            self._reading.notes.append(f"{self._where}: two bases set {key!r}; mmcv refuses that.")
        for key, value in merged(self._base, values).items():
            self._base.put(key, value, values.origins.get(key))

    def _base_files(self) -> Iterator[Path]:
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and _is_name(statement.targets[0], "_base_"):
                given = self._evaluator.value(statement.value)
                for name in given if isinstance(given, list | tuple) else [given]:
                    yield from self._base_file(name, statement.lineno)

    def _base_file(self, name: Any, line: int) -> Iterator[Path]:
        where = f"{self._where}:{line}"
        if not isinstance(name, str) or "::" in name:
            self._reading.notes.append(f"{where}: the base {name} is not followed.")
            return
        path = self._path.parent / name
        if not path.is_file():
            raise BevctlError(f"{where}: the base {name} does not exist.", f"It is looked for at {display(path)}.")
        yield path

    def _run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            try:
                self._statement(statement)
            except CannotResolve as error:
                self._give_up(statement, str(error))
            except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError) as error:
                self._give_up(statement, f"{type(error).__name__}: {error!s:.60}")

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            value = self._evaluator.value(node.value)
            for target in node.targets:
                self._assign(target, value, node.lineno)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self._assign(node.target, self._evaluator.value(node.value), node.lineno)
        elif isinstance(node, ast.AugAssign):
            value = self._evaluator.resolve(ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))
            self._assign(node.target, value, node.lineno)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                self._delete(target)
        elif isinstance(node, ast.If):
            self._run(node.body if self._evaluator.resolve(node.test) else node.orelse)
        elif isinstance(node, ast.For):
            self._for(node)
        elif isinstance(node, ast.With):
            self._with(node)
        elif isinstance(node, ast.Expr):
            self._expression(node.value)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif not isinstance(node, ast.Pass):
            raise CannotResolve(f"{type(node).__name__} is not followed")

    def _assign(self, target: ast.expr, value: Any, line: int) -> None:
        if isinstance(target, ast.Subscript | ast.Attribute):
            holder, key = self._place(target)
            if isinstance(holder, Section):
                holder.put(key, value, self._origin(line))
            else:
                holder[key] = value
            return
        for name, item in bound(target, value):
            if name != "_base_":
                self._set(name, item, self._origin(line))

    def _set(self, name: str, value: Any, origin: Origin) -> None:
        self._names[name] = value
        if not name.startswith("__"):
            self._own.put(name, value, origin)

    def _place(self, target: ast.Subscript | ast.Attribute) -> tuple[Any, Any]:
        holder = self._evaluator.resolve(target.value)
        if not isinstance(holder, dict | list):
            raise CannotResolve(f"an item of a {type(holder).__name__}")
        return holder, target.attr if isinstance(target, ast.Attribute) else self._evaluator.resolve(target.slice)

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self._names.pop(target.id, None)
            self._own.remove(target.id)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            holder, key = self._place(target)
            del holder[key]

    def _for(self, node: ast.For) -> None:
        rounds = list(self._evaluator.resolve(node.iter))
        if len(rounds) > _MAX_ROUNDS:
            raise CannotResolve("a loop that long")
        for item in rounds:
            self._assign(node.target, item, node.lineno)
            self._run(node.body)

    def _with(self, node: ast.With) -> None:
        """`with read_base():` and its relative imports."""
        call = node.items[0].context_expr
        if not (isinstance(call, ast.Call) and _is_name(call.func, "read_base")):
            raise CannotResolve("With is not followed")
        self._reading.lazy = True
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and statement.level:
                self._import_base(statement)
            elif not isinstance(statement, ast.Pass):
                self._reading.notes.append(f"{self._where}:{statement.lineno}: a base of a package is not followed.")

    def _import_base(self, node: ast.ImportFrom) -> None:
        folder = self._path.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        path = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
        if not path.is_file():
            raise BevctlError(
                f"{self._where}:{node.lineno}: the base {display(path)} does not exist.", "Check the name."
            )
        values = self._reading.read(path)
        self._names.update(self._reading.imported[path])
        for alias in node.names:
            for name in values if alias.name == "*" else [alias.name]:
                if name in values:
                    self._names[alias.asname or name] = values[name]
                    self._base.put(name, values[name], values.origins.get(name))

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and node.level:  # `if '_base_':` is an older way to say read_base()
            self._import_base(node)
            return
        package = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.module else ""
        modules = [package or alias.name for alias in node.names]
        self._reading.lazy |= any(name.split(".")[0] not in sys.stdlib_module_names for name in modules)
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            self._names[name] = Unresolved(package + alias.name, "imported")

    def _expression(self, node: ast.expr) -> None:
        """A call that changes a list or mapping, such as `train_pipeline.insert(0, …)`; a docstring does nothing."""
        if isinstance(node, ast.Constant):
            return
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            raise CannotResolve("a call that is not followed")
        holder = self._evaluator.resolve(node.func.value)
        if isinstance(holder, Section) and node.func.attr in ("update", "merge"):
            given = self._evaluator.resolve_dict(node)
            changed = merged(holder, given) if node.func.attr == "merge" else given
            for key, value in changed.items():
                holder.put(key, value, changed.origins.get(key) or self._origin(node.lineno))
        elif isinstance(holder, list) and node.func.attr in ("append", "insert", "extend", "pop"):
            arguments = [self._evaluator.value(argument) for argument in node.args]
            getattr(holder, node.func.attr)(*arguments)
        elif isinstance(holder, Section) and node.func.attr == "pop":
            holder.remove(self._evaluator.resolve(node.args[0]))
        else:
            raise CannotResolve(f"a call of {node.func.attr}")

    def _give_up(self, node: ast.stmt, reason: str) -> None:
        """Whatever the statement may have set is not known any more."""
        line = getattr(node, "lineno", 0)
        names = [
            inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        ]
        names += [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        for name in names:
            self._names[name] = Unresolved(name, reason)
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                self._own.put(name, self._names[name], self._origin(line))
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._reading.notes.append(f"{self._where}:{line}: not worked out ({reason}).")


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
