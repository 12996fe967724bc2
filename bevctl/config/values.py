"""From a YAML node to the value that a schema field declares, with its range and choices checked."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from bevctl.config import document
from bevctl.errors import BevctlError, did_you_mean

TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")


@dataclass(frozen=True)
class Spec:
    """One field of a section, with its annotation resolved."""

    name: str
    hint: Any
    default: Any
    metadata: types.MappingProxyType[Any, Any]

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return type(None) in _members(self.hint)

    @property
    def section(self) -> type | None:
        """The dataclass of a (possibly null) section; None for a plain field."""
        return next((m for m in _members(self.hint) if isinstance(m, type) and dataclasses.is_dataclass(m)), None)

    @property
    def is_table(self) -> bool:
        """Whether the field is a mapping with free keys."""
        return typing.get_origin(self.hint) is dict


@functools.cache
def specs_of(section: type) -> dict[str, Spec]:
    """The fields of a section by name, in their order."""
    hints = typing.get_type_hints(section)
    return {field.name: _spec(field, hints[field.name]) for field in dataclasses.fields(section)}


def _spec(field: dataclasses.Field[Any], hint: Any) -> Spec:
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return Spec(field.name, hint, default, field.metadata)


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or _is_union(hint) else (hint,)


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Union


class Mismatch(Exception):
    """The node is not what the field declares; the message completes "<key> must be ..."."""


def convert(node: Node, spec: Spec, key: str, where: str) -> Any:
    """The value of field `key` in `node`; `where` (file and line, or option) opens the error message."""
    try:
        return _typed(node, spec.hint, spec, where)
    except Mismatch as wrong:
        hint = f"{key}: {spec.metadata['help']}." if "help" in spec.metadata else ""
        raise BevctlError(f"{where}: {key} must be {wrong}, not {_shown(node)}.", hint) from None


def _typed(node: Node, hint: Any, spec: Spec, where: str) -> Any:
    members = _members(hint)
    if len(members) > 1:
        return _union(node, members, spec, where)
    if typing.get_origin(hint) is tuple:
        return _sequence(node, typing.get_args(hint), spec, where)
    if dataclasses.is_dataclass(hint):
        return _element(node, typing.cast(type, hint), where)
    return _scalar(node, hint, spec)


def _union(node: Node, members: tuple[Any, ...], spec: Spec, where: str) -> Any:
    optional = type(None) in members
    if optional and document.is_null(node):
        return None
    others = [member for member in members if member is not type(None)]
    problems = []
    for member in others:
        try:
            return _typed(node, member, spec, where)
        except Mismatch as wrong:
            problems.append(str(wrong))
    raise Mismatch(" or ".join(dict.fromkeys(problems + ["null"] * optional)))


def _sequence(node: Node, arguments: tuple[Any, ...], spec: Spec, where: str) -> tuple[Any, ...]:
    node = _listed(node)
    free = len(arguments) == 2 and arguments[1] is Ellipsis
    if not isinstance(node, SequenceNode) or (not free and len(node.value) != len(arguments)):
        raise Mismatch("a list" if free else f"a list of {len(arguments)} values")
    hints = [arguments[0]] * len(node.value) if free else arguments
    try:
        return tuple(_typed(item, hint, spec, where) for item, hint in zip(node.value, hints, strict=True))
    except Mismatch as wrong:
        raise Mismatch(f"a list in which each value is {wrong}") from None


def _listed(node: Node) -> Node:
    """A list written as the command lines of mmcv and torchpack allow: `1,2` or `(1, 2)`."""
    if isinstance(node, ScalarNode) and node.style is None and "," in node.value:
        return document.value_node(f"[{node.value.strip().removeprefix('(').removesuffix(')')}]")
    return node


def span_text(node: Node) -> Node:
    """A range written as a list, `[low, high]` with null for an open end, as the text `low:high`."""
    node = _listed(node)
    if not isinstance(node, SequenceNode) or not _is_flat(node):
        return node
    return document.text_node(":".join("" if document.is_null(end) else end.value for end in node.value))


def _element(node: Node, section: type, where: str) -> Any:
    """A dataclass inside a list."""
    if not isinstance(node, MappingNode):
        raise Mismatch(f"a mapping of {', '.join(specs_of(section))}")
    values = {}
    for name, value, _ in document.items(node, where):
        if name not in specs_of(section):
            raise BevctlError(f"{where}: unknown key {name!r}.", did_you_mean(name, specs_of(section)))
        values[name] = convert(value, specs_of(section)[name], name, where)
    return section(**values)


def _scalar(node: Node, hint: type, spec: Spec) -> Any:
    word = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[hint]
    if not isinstance(node, ScalarNode) or not _is_plain_tag(node) or (hint is not str and node.style is not None):
        raise Mismatch(word)
    if hint is str:
        return _text(node, spec)
    if hint is bool:
        return _bool(node.value.lower())
    try:
        number = int(node.value) if hint is int else float(node.value)
    except ValueError:
        raise Mismatch(word) from None
    return _ranged(number, spec)


def _is_plain_tag(node: Node) -> bool:
    return node.tag.startswith("tag:yaml.org,2002:") and not node.tag.startswith("tag:yaml.org,2002:python")


def _text(node: ScalarNode, spec: Spec) -> str:
    choices = spec.metadata.get("choices")
    if choices and node.value not in choices:
        raise Mismatch(f"one of {', '.join(choices)}")
    if document.is_null(node):
        raise Mismatch("text")
    return str(node.value)


def _bool(text: str) -> bool:
    if text not in TRUE + FALSE:
        raise Mismatch("true or false")
    return text in TRUE


def _ranged(number: float, spec: Spec) -> float:
    low, high, above = (spec.metadata.get(name) for name in ("low", "high", "above"))
    if not math.isfinite(number):
        raise Mismatch("a finite number")
    if low is not None and number < low:
        raise Mismatch(f"at least {low}")
    if high is not None and number > high:
        raise Mismatch(f"at most {high}")
    if above is not None and number <= above:
        raise Mismatch(f"more than {above}")
    return number


def _shown(node: Node) -> str:
    if isinstance(node, ScalarNode):
        return "null" if document.is_null(node) else f"{node.value!r:.60}"
    if isinstance(node, SequenceNode):
        return f"[{', '.join(_shown(item) for item in node.value[:7])}]" if _is_flat(node) else "a nested list"
    return "a mapping"


def _is_flat(node: SequenceNode) -> bool:
    return all(isinstance(item, ScalarNode) for item in node.value)
