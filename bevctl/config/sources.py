"""Where the values of a config come from: files and their base, `--set`, single values, plain data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode

from bevctl.config import document
from bevctl.config.layers import Layer, Origin, layer
from bevctl.errors import BevctlError, did_you_mean

_ASSIGNMENT = re.compile(r"([A-Za-z_][\w./-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Given:
    """A value with the name it was given under: an option such as `--batch`, or an environment variable."""

    value: object
    name: str


def find(source: str | Path) -> Path:
    """The file of a path or packaged name. Raises BevctlError with the nearest name."""
    path = Path(source)
    if is_there(path):
        return path
    packaged = document.packaged_folder() / f"{source}.yaml"
    if path.name == str(source) and packaged.is_file():
        return packaged
    names = document.packaged_names()
    if path.name == str(source) and not path.suffix:
        raise BevctlError(
            f"No config {str(source)!r}: neither a file nor a packaged config.", did_you_mean(path.name, names)
        )
    raise BevctlError(f"Config file {source} does not exist.", f"Give a path, or one of {', '.join(names)}.")


def is_there(path: Path) -> bool:
    """Whether a path exists, if only as a broken link. Raises BevctlError where the system cannot say."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BevctlError(f"Cannot read config {str(path)!r:.80}: {reason}.", "Give a path or a name.") from None
    return True


def file_layers(path: Path) -> Iterator[Layer]:
    """The base of a config file, if it has one, then the file; a config without a name is called as its file."""
    node, base = _split_base(path)
    if base is not None:
        below, second = _split_base(base)
        if second is not None:
            where = document.display(base)
            raise BevctlError(f"{where}: a base has no base of its own.", "Copy the values, or use its base directly.")
        yield [(key, entry) for key, entry in _mapping_layer(below, "file", base) if key != "name"]
    yield value_layer("name", Given(path.stem, document.display(path)), "file")
    yield _mapping_layer(node, "file", path)


def _split_base(path: Path) -> tuple[MappingNode, Path | None]:
    """The mapping of a file without its `base:` key, and the file that key names."""
    node = document.read_mapping(path)
    where = document.display(path)
    base = None
    for key, value, line in document.items(node, where):
        if key == "base":
            base = _find_base(value, path, f"{where}:{line}")
    rest = [(key, value) for key, value in node.value if key.value != "base"]
    return MappingNode(node.tag, rest, node.start_mark, node.end_mark), base


def _find_base(value: Node, path: Path, where: str) -> Path:
    if not isinstance(value, ScalarNode) or document.is_null(value):
        raise BevctlError(f"{where}: base must be the name or path of one config.", "Leave it out where there is none.")
    try:
        for candidate in (path.parent / value.value, path.parent / f"{value.value}.yaml"):
            if is_there(candidate):
                return candidate
        return find(value.value)
    except BevctlError as error:
        raise BevctlError(f"{where}: base {value.value!r} was not found.", error.hint) from None


def set_layer(text: str) -> Layer:
    """What one `--set` gives: `key=value` or the path of a YAML file. Raises BevctlError."""
    match = _ASSIGNMENT.fullmatch(text)
    if match:
        node = document.nested(match[1], document.value_node(match[2]))
        return layer(node, lambda _: Origin("set", f"--set {text}"))
    path = Path(text)
    if path.suffix not in (".yaml", ".yml") and not is_there(path):
        raise BevctlError(f"--set {text}: neither key=value nor a YAML file.", "For example --set train.batch=4.")
    return _mapping_layer(document.read_mapping(path), "set", path)


def _mapping_layer(node: MappingNode, kind: str, path: Path) -> Layer:
    where = document.display(path)
    return layer(node, lambda line: Origin(kind, where, line))


def value_layer(key: str, value: object, kind: str) -> Layer:
    """One value (plain or `Given`) by its dotted key. Raises BevctlError for an unknown key."""
    given = value if isinstance(value, Given) else Given(value, f"{kind} {key}")
    node = document.nested(key, document.python_node(given.value))
    return layer(node, lambda _: Origin(kind, given.name))


def data_layer(data: Mapping[str, Any], where: str) -> Layer:
    """Plain data as a config file would give it; `where` names it. Raises BevctlError."""
    node = document.python_node(dict(data))
    if not isinstance(node, MappingNode):
        raise BevctlError(f"{where} holds no mapping.", "It is a mapping of sections, such as `train`.")
    return layer(node, lambda _: Origin("file", where))
