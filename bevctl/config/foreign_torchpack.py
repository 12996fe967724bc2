"""Configs of mit-bevfusion: a YAML file under the `default.yaml` of every folder above it, and `${…}` expressions."""

from __future__ import annotations

import ast
import os
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, SequenceNode

from bevctl.config import document
from bevctl.config.document import display
from bevctl.config.foreign_expressions import CannotResolve, Evaluator, parse
from bevctl.config.foreign_refusals import refuse_code
from bevctl.config.foreign_values import Section, Unresolved, merged
from bevctl.config.layers import Origin
from bevctl.errors import BevctlError

_MAPPING, _SEQUENCE = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"
_MAX_DEPTH = 50
_MAX_NODES = 100_000


def chain(path: Path) -> list[Path]:
    """The files that make up the config of `path`, outermost first, itself last.

    Above a relative path only the working directory's own `default.yaml` and those below it count, as in torchpack.
    """
    candidates = [folder / "default.yaml" for folder in path.parents]
    return [*reversed([c for c in candidates if os.path.isfile(c) and c != path]), path]


def read(path: Path, changes: Section | None = None) -> tuple[Section, list[Path]]:
    """The merged config with its expressions worked out, and the files.

    Args:
        changes: what is laid over the files before any expression is worked out, as torchpack's command line is.

    Raises BevctlError that names file and line.
    """
    values, files = Section(), chain(path)
    for file in files:
        values = merged(values, YamlFile(file).section(document.read_mapping(file)))
    return _Expressions(merged(values, changes or Section())).worked_out(), files


class YamlFile:
    """Nodes of one file as values, by PyYAML's own scalar rules, which torchpack and OpenPCDet use."""

    def __init__(self, path: Path) -> None:
        self._where = display(path)
        self._loader = yaml.SafeLoader("")
        self._nodes = 0

    def section(self, node: MappingNode, depth: int = 0) -> Section:
        section = Section()
        self._loader.flatten_mapping(node)  # `<<: *alias`
        for key, value in node.value:
            line = document.line_of(key)
            section.put(str(self.value(key, depth)), self.value(value, depth + 1), Origin("file", self._where, line))
        return section

    def value(self, node: Node, depth: int) -> Any:
        self._nodes += 1
        where = f"{self._where}:{document.line_of(node)}"
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise BevctlError(f"{where}: an alias refers to itself, or aliases grow without end.", "Write it out.")
        if isinstance(node, MappingNode) and node.tag == _MAPPING:
            return self.section(node, depth)
        if isinstance(node, SequenceNode) and node.tag == _SEQUENCE:
            return [self.value(item, depth + 1) for item in node.value]
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError, OverflowError):
            raise BevctlError(f"{where}: {node.value!r:.40} cannot be read as {node.tag}.", "Fix the value.") from None


class _Expressions:
    """Works out `${…}` strings, whose names are the config's own top-level keys."""

    def __init__(self, values: Section) -> None:
        self._values = values
        self._open: list[str] = []

    def worked_out(self) -> Section:
        done = self._value(self._values)
        assert isinstance(done, Section)
        return done

    def _value(self, value: Any, origin: Origin | None = None) -> Any:
        if isinstance(value, Section):
            result = Section()
            for key, item in value.items():
                of_key = value.origins.get(key)
                result.put(key, self._value(item, of_key or origin), of_key)
            return result
        if isinstance(value, list | tuple):
            return [self._value(item, origin) for item in value]
        if isinstance(value, str) and value.startswith("${") and value.endswith("}"):
            return self._expression(value, origin)
        return value

    def _expression(self, text: str, origin: Origin | None) -> Any:
        if text in self._open:
            return Unresolved(text, "it refers to itself")
        where, line = (origin.where, origin.line) if origin else ("the config", 1)
        self._open.append(text)
        try:
            tree = parse(text[2:-1].strip(), "eval")
            assert isinstance(tree, ast.Expression)
            refuse_code(tree, where, line)
            names = _Names(self._values, self._value)
            return self._value(Evaluator(names, lambda line: Origin("file", "expression", line)).value(tree.body))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if isinstance(error, RecursionError | MemoryError) or "nested" in str(error):
                raise BevctlError(
                    f"{where}:{line}: an expression is nested too deeply to read.", "Write the value out."
                ) from None
            return Unresolved(text, "not a valid expression")
        finally:
            self._open.pop()


class _Names(dict[str, Any]):
    """The config's top-level keys, each worked out when it is used."""

    def __init__(self, values: Section, work_out: Any) -> None:
        super().__init__(values)
        self._work_out = work_out

    def __getitem__(self, key: str) -> Any:
        value = self._work_out(super().__getitem__(key))
        if isinstance(value, Unresolved):
            raise CannotResolve(value.reason)
        return value
