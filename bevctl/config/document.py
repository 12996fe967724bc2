"""YAML text as nodes that know their line; scalars keep their text, so that the schema decides what they are.

PyYAML's own scalar rules (YAML 1.1) read `2e-4` as text and `2:30` as the number 150; nothing here uses them.
"""

from __future__ import annotations

import importlib
import stat
from collections.abc import Iterator
from pathlib import Path

import yaml
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from bevctl.errors import BevctlError

MAX_BYTES = 256 * 1024
"""A config is a page of text; what is larger is another kind of file."""
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
"""Where streams are found that this process was started with: standard input, and a shell's `<(...)`."""
NULLS = ("", "~", "null", "Null", "NULL")
_MAP = "tag:yaml.org,2002:map"
_STR = "tag:yaml.org,2002:str"


def display(path: Path) -> str:
    """`path` as messages show it: relative where it lies below the working directory."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (OSError, ValueError, RuntimeError):
        return str(path)


def read_bytes(path: Path) -> bytes:
    """What a config file holds, whatever its language. The one place where configs are opened.

    Raises:
        BevctlError: it cannot be read, is too large for a config, or neither a file nor a stream that is open already
            (opening a named pipe waits for somebody to write into it, for ever).
    """
    where = display(path)
    try:
        if not (stat.S_ISREG(path.stat().st_mode) or path.is_dir() or str(path.absolute()).startswith(_STREAMS)):
            raise BevctlError(f"{where} is a pipe or a device, not a config file.", "Give the path of a regular file.")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BevctlError(f"Cannot read config {where}: {error.strerror or error}.", "Check the path.") from None
    if len(data) > MAX_BYTES:
        raise BevctlError(f"{where} is larger than {MAX_BYTES // 1024} KiB.", "A config is a file of a few KiB.")
    return data


def read_mapping(path: Path) -> MappingNode:
    """The top-level mapping of a YAML file. Raises BevctlError that names the file and the line."""
    return parse_mapping(read_bytes(path), display(path))


def parse_mapping(data: bytes | str, where: str) -> MappingNode:
    """The top-level mapping of YAML text; `where` names its source in errors."""
    node = _compose(data, where)
    if node is None:
        raise BevctlError(f"{where} is empty.", "A config is a YAML mapping of sections, such as `train:`.")
    if not isinstance(node, MappingNode):
        raise BevctlError(f"{where} holds no mapping.", "A config is a YAML mapping of sections, such as `train:`.")
    return node


def _compose(data: bytes | str, where: str) -> Node | None:
    try:
        return yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise BevctlError(
            f"{where}{line}: not valid YAML: {error.problem or error.context}.", "Fix the line."
        ) from None
    except yaml.YAMLError:
        raise BevctlError(f"{where} is not text that YAML allows.", "A config is a YAML file in UTF-8.") from None
    except (UnicodeDecodeError, RecursionError, ValueError):
        raise BevctlError(f"{where} cannot be parsed as YAML.", "A config is a YAML file in UTF-8.") from None


def value_node(text: str) -> Node:
    """The node of the value in `key=value`: a YAML scalar, `[list]` or `{mapping}`, otherwise the text itself.

    Python's None, which other launchers write, is null.
    """
    try:
        node = yaml.compose("null" if text == "None" else text, Loader=yaml.SafeLoader) or ScalarNode(_STR, "")
    except (yaml.YAMLError, RecursionError, ValueError):
        node = None
    # `2.5:` and `- a` are texts here, not the block mapping and list that YAML sees.
    is_block = isinstance(node, CollectionNode) and not node.flow_style
    return ScalarNode(_STR, text) if node is None or is_block else node


def text_node(text: str) -> ScalarNode:
    """The node of a text."""
    return ScalarNode(_STR, text)


def python_node(value: object) -> Node:
    """The node of a plain Python value. Raises BevctlError where YAML has no form for it."""
    try:
        node = yaml.compose(yaml.safe_dump(value), Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        raise BevctlError(f"{value!r:.80} is not a plain value.", "Use numbers, text, lists and mappings.") from None
    assert node is not None
    return node


def nested(key: str, value: Node) -> MappingNode:
    """The mapping that `key: value` would be with each dot of `key` as a level."""
    node = value
    for part in reversed(key.split(".")):
        node = MappingNode(_MAP, [(ScalarNode(_STR, part), node)])
    assert isinstance(node, MappingNode)
    return node


def items(node: MappingNode, where: str) -> Iterator[tuple[str, Node, int]]:
    """(key, value, line) of a mapping, in its order. Raises BevctlError for a key that comes twice or is no text."""
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = line_of(key)
        if not isinstance(key, ScalarNode):
            raise BevctlError(
                f"{where}:{line}: a key must be a word.", "Keys are the names `bevctl config show` lists."
            )
        if key.value in seen:
            raise BevctlError(
                f"{where}:{line}: key {key.value!r} comes twice (first in line {seen[key.value]}).", "Keep one of them."
            )
        seen[key.value] = line
        yield key.value, value, line


def line_of(node: Node) -> int:
    """1-based line of a node; 0 for one that comes from no text."""
    return int(node.start_mark.line) + 1 if node.start_mark else 0


def is_null(node: Node) -> bool:
    """Whether the node is an unquoted null."""
    return isinstance(node, ScalarNode) and node.style is None and node.value in NULLS


def packaged_folder() -> Path:
    """Folder of the packaged configs: `bevctl.configs`, or `configs/` of a checkout that is not installed."""
    try:
        packaged = importlib.import_module("bevctl.configs")
    except ModuleNotFoundError:
        return Path(__file__).parents[2] / "configs"
    return Path(packaged.__path__[0])


def packaged_names() -> list[str]:
    """Names of the packaged configs."""
    return sorted(path.stem for path in packaged_folder().glob("*.yaml"))
