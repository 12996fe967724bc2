"""What a training script takes on its command line, read from its text; it is never run for that."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bevctl.config.document import display
from bevctl.config.foreign_expressions import parse
from bevctl.errors import BevctlError

_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Script:
    """One training script."""

    path: Path
    text: str
    options: Mapping[str, bool] = field(default_factory=dict)
    """Option (`--amp`) → whether it takes a value."""
    imports: frozenset[str] = frozenset()
    """Top-level packages that it imports."""

    def has(self, option: str) -> bool:
        """Whether the script defines an option."""
        return option in self.options

    @property
    def reads_rank_from_environment(self) -> bool:
        """Whether it takes LOCAL_RANK from the environment, as torchrun sets it, or only `--local_rank`."""
        return any(f"{quote}LOCAL_RANK{quote}" in self.text for quote in "'\"")


def read_script(path: Path) -> Script:
    """The script in `path`. Raises BevctlError for one that cannot be read or is no Python."""
    try:
        text = path.read_bytes()[:_MOST_BYTES].decode("utf-8", "replace")
        tree = parse(text)
    except OSError as error:
        raise BevctlError(f"{display(path)} cannot be read: {error.strerror or error}.", "Check --repo.") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BevctlError(
            f"{display(path)} is no Python that can be read.", "Check the tree that --repo names."
        ) from None
    options: dict[str, bool] = {}
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            options |= dict.fromkeys(_names(node), _takes_value(node))
    return Script(path, text, options, frozenset(imports))


def _names(node: ast.Call) -> list[str]:
    names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
    return [name for name in names if isinstance(name, str) and name.startswith("-")]


def _takes_value(node: ast.Call) -> bool:
    action = next((keyword.value for keyword in node.keywords if keyword.arg == "action"), None)
    return not (isinstance(action, ast.Constant) and str(action.value).startswith("store_"))
