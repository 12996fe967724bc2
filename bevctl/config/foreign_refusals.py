"""Code that no config needs: a foreign config that holds it is refused before anything in it is worked out."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bevctl.errors import BevctlError

_CALLS = ("__import__", "eval", "exec", "compile", "getattr", "setattr", "globals", "locals", "breakpoint")
_PROGRAMS = ("subprocess", "pty", "ctypes")
_OF_MODULE = {
    "os": ("system", "popen", "execv", "execve", "fork", "remove", "unlink", "rmdir", "spawnl", "spawnv", "kill"),
    "shutil": ("rmtree", "move"),
}
_KNOWN_NAMES = ("__file__", "__name__", "__doc__", "__all__", "__future__", "__version__")


def refuse_code(tree: ast.AST, where: str, first_line: int = 1) -> None:
    """Raises BevctlError (exit 2), with file and line, where a config runs programs or reaches into the interpreter.

    What a config may do and bevctl does not follow (`import os`, an environment variable) is none of it.

    Args:
        first_line: line of the file that the tree's line 1 is.
    """
    for node in ast.walk(tree):
        for words in _code(node):
            line = getattr(node, "lineno", 1) + first_line - 1
            raise BevctlError(
                f"{where}:{line}: the config runs code ({words}), which bevctl does not; nothing of it was run.",
                "Write the value out; do not train with a config that you have not read.",
            )


def _code(node: ast.AST) -> Iterator[str]:
    """What in this node is code, none or one text."""
    if isinstance(node, ast.Name) and _is_hidden(node.id):
        yield node.id
    elif isinstance(node, ast.Attribute) and _is_hidden(node.attr):
        yield f".{node.attr}"
    elif isinstance(node, ast.Call):
        name = _dotted(node.func)
        module, _, function = name.partition(".")
        if name in _CALLS or function in _OF_MODULE.get(module, ()) or (module in _PROGRAMS and function):
            yield name


def _is_hidden(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in _KNOWN_NAMES


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of names and attributes; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""
