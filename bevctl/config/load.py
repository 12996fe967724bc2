"""From a config's name, overrides and options to one frozen `Config` that knows where each value comes from.

Layers, weakest first: defaults of the schema, `base:` of the file, the file, environment, `--set`, options.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node

from bevctl.config import document, rules
from bevctl.config.schema import Config
from bevctl.config.values import Spec, convert, specs_of
from bevctl.errors import BevctlError, did_you_mean

DEFAULT = "bevfusion_multitask_fp16"
LOCAL = Path("bevctl.yaml")
_ASSIGNMENT = re.compile(r"([A-Za-z_][\w./-]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class Origin:
    """Where a value was given."""

    kind: str
    """default, file, environment, set or option."""
    where: str = ""
    """File, variable, `--set` text or option."""
    line: int = 0
    """1-based line of a file; 0 elsewhere."""

    def __str__(self) -> str:
        return f"{self.where}:{self.line}" if self.line else self.where or self.kind


@dataclass(frozen=True)
class Loaded:
    """A resolved config."""

    config: Config
    origins: dict[str, Origin]
    """Origin of each value, by its dotted key."""
    notes: list[str] = field(default_factory=list)
    """What the user should read on stderr."""
    path: Path | None = None
    """The config file, None for one that came as data."""


@dataclass(frozen=True)
class Given:
    """A value with the name it was given under: an option such as `--batch`, or an environment variable."""

    value: object
    name: str


@dataclass(frozen=True)
class _Entry:
    node: Node
    origin: Origin


_Entries = dict[str, _Entry]


def load(
    source: str | Path | None,
    *,
    sets: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    environment: Mapping[str, object] | None = None,
    fallback: Callable[[], str | Path | Mapping[str, Any] | None] | None = None,
) -> Loaded:
    """Resolve a config.

    Args:
        source: path or packaged name; None: `bevctl.yaml` in the working directory, else `fallback()`, else DEFAULT.
        sets: `key=value` (the value in YAML) or the path of a YAML file; later wins.
        options: values (plain or `Given`) by dotted key that rank above `sets`.
        environment: values (plain or `Given`) by dotted key that rank below `sets`, above the file.
        fallback: what to use without CONFIG, when resuming: a path, a name, or a config as data; None for nothing.

    Raises BevctlError (exit code 2) that names file and line, or the option, for what is not as the schema says.
    """
    notes: list[str] = []
    chosen = _choose(source, fallback, notes)
    path = None if isinstance(chosen, Mapping) else find(chosen)
    entries: _Entries = {}
    if path is None:
        assert isinstance(chosen, Mapping)
        _overlay(entries, _data_layer(chosen, "the resumed run"))
    else:
        for layer in _file_layers(path):
            _overlay(entries, layer)
    for key, value in (environment or {}).items():
        _overlay(entries, _value_layer(key, value, "environment"))
    for text in sets:
        _overlay(entries, _set_layer(text))
    for key, value in (options or {}).items():
        layer = list(_value_layer(key, value, "option"))
        notes.extend(_overridden(entries, layer))
        _overlay(entries, layer)
    config, origins = _resolve(entries)
    return Loaded(config, origins, notes, path)


def from_dict(data: Mapping[str, Any]) -> Config:
    """The config of plain data, such as `to_dict` gives; checked like a file. Raises BevctlError."""
    entries: _Entries = {}
    _overlay(entries, _data_layer(data, "config"))
    return _resolve(entries)[0]


def to_dict(config: Config) -> dict[str, Any]:
    """The config as dicts, lists, text, numbers, booleans and None."""
    plain: dict[str, Any] = _plain(config)
    return plain


def to_yaml(config: Config) -> str:
    """The config as YAML text, every value given; `load` reads back the same config."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def annotated_yaml(loaded: Loaded) -> str:
    """The config as YAML text with the origin of each value as a comment."""
    rows: list[tuple[str, str]] = []
    _annotate(to_dict(loaded.config), "", loaded.origins, rows)
    width = min(max(len(text) for text, _ in rows), 60)
    return "".join(f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in rows)


def _annotate(
    values: Mapping[str, Any], prefix: str, origins: Mapping[str, Origin], rows: list[tuple[str, str]]
) -> None:
    for name, value in values.items():
        key = prefix + name
        indent = "  " * prefix.count(".")
        if isinstance(value, dict) and value:
            rows.append((f"{indent}{name}:", ""))
            _annotate(value, f"{key}.", origins, rows)
        else:
            text = yaml.dump({name: value}, Dumper=_Dumper, width=10_000, allow_unicode=True).rstrip("\n")
            first, *rest = text.split("\n")
            rows.append((f"{indent}{first}", str(origins.get(key, "default"))))
            rows.extend((f"{indent}{line}", "") for line in rest)


class _Dumper(yaml.SafeDumper):
    """Block mappings, lists of plain values in one line, no aliases."""

    def ignore_aliases(self, _: object) -> bool:
        return True

    def represent_list(self, data: Any) -> yaml.SequenceNode:
        flow = not any(isinstance(item, dict) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _Dumper.represent_list)


def find(source: str | Path) -> Path:
    """The file of a path or packaged name. Raises BevctlError with the nearest name."""
    path = Path(source)
    if _is_there(path):
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


def _is_there(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BevctlError(f"Cannot read config {str(path)!r:.80}: {reason}.", "Give a path or a name.") from None
    return True


def _choose(
    source: str | Path | None,
    fallback: Callable[[], str | Path | Mapping[str, Any] | None] | None,
    notes: list[str],
) -> str | Path | Mapping[str, Any]:
    if source is not None:
        return source
    if LOCAL.exists():
        notes.append(f"No CONFIG given: using {LOCAL} of this folder.")
        return LOCAL
    resumed = fallback() if fallback else None
    if resumed is not None:
        notes.append("No CONFIG given: using the config of the resumed run.")
        return resumed
    notes.append(f"No CONFIG given: using the packaged config {DEFAULT}.")
    return DEFAULT


def _file_layers(path: Path) -> Iterator[list[tuple[str, _Entry]]]:
    """The base of a config file, if it has one, then the file; a config without a name is called as its file."""
    node, base = _split_base(path)
    if base is not None:
        below, second = _split_base(base)
        if second is not None:
            where = document.display(base)
            raise BevctlError(f"{where}: a base has no base of its own.", "Copy the values, or use its base directly.")
        yield [entry for entry in _file_layer(below, base) if entry[0] != "name"]
    yield list(_value_layer("name", path.stem, "file", document.display(path)))
    yield list(_file_layer(node, path))


def _file_layer(node: MappingNode, path: Path) -> Iterator[tuple[str, _Entry]]:
    where = document.display(path)
    return _flatten(node, Config, "", lambda line: Origin("file", where, line))


def _split_base(path: Path) -> tuple[MappingNode, Path | None]:
    """The mapping of a file without its `base:` key, and the file that key names."""
    node = document.read_mapping(path)
    where = document.display(path)
    rest, base = [], None
    pairs = {key: (value, line) for key, value, line in document.items(node, where)}
    if "base" in pairs:
        value, line = pairs["base"]
        base = _find_base(value, path, f"{where}:{line}")
        rest = [(key, value) for key, value in node.value if key.value != "base"]
        node = MappingNode(node.tag, rest, node.start_mark, node.end_mark)
    return node, base


def _find_base(value: Node, path: Path, where: str) -> Path:
    if not isinstance(value, yaml.ScalarNode) or document.is_null(value):
        raise BevctlError(f"{where}: base must be the name or path of one config.", "Leave it out where there is none.")
    for candidate in (path.parent / value.value, path.parent / f"{value.value}.yaml"):
        if candidate.is_file():
            return candidate
    try:
        return find(value.value)
    except BevctlError as error:
        raise BevctlError(f"{where}: base {value.value!r} was not found.", error.hint) from None


def _data_layer(data: Mapping[str, Any], where: str) -> Iterator[tuple[str, _Entry]]:
    node = document.python_node(dict(data))
    if not isinstance(node, MappingNode):
        raise BevctlError(f"{where} holds no mapping.", "It is a mapping of sections, such as `train`.")
    return _flatten(node, Config, "", lambda _: Origin("file", where))


def _set_layer(text: str) -> list[tuple[str, _Entry]]:
    match = _ASSIGNMENT.fullmatch(text)
    if match:
        node = document.nested(match[1], document.value_node(match[2]))
        return list(_flatten(node, Config, "", lambda _: Origin("set", f"--set {text}")))
    if not Path(text).suffix and not Path(text).exists():
        raise BevctlError(f"--set {text}: neither key=value nor a YAML file.", "For example --set train.batch=4.")
    path = Path(text)
    where = document.display(path)
    node = document.read_mapping(path)
    return list(_flatten(node, Config, "", lambda line: Origin("set", where, line)))


def _value_layer(key: str, value: object, kind: str, where: str = "") -> Iterator[tuple[str, _Entry]]:
    given = value if isinstance(value, Given) else Given(value, where or f"{kind} {key}")
    node = document.nested(key, document.python_node(given.value))
    origin = Origin(kind, given.name)
    return _flatten(node, Config, "", lambda _: origin)


def _flatten(
    node: MappingNode, section: type, prefix: str, origin: Callable[[int], Origin]
) -> Iterator[tuple[str, _Entry]]:
    """(dotted key, entry) of each value; an opened section comes as itself before its values."""
    specs = specs_of(section)
    for name, value, line in document.items(node, str(origin(0))):
        key, here = prefix + name, origin(line)
        if name not in specs:
            raise BevctlError(f"{here}: unknown key {key!r}.", _nearest(name, prefix, specs))
        spec = specs[name]
        if spec.section is not None and isinstance(value, MappingNode):
            yield key, _Entry(value, here)
            yield from _flatten(value, spec.section, f"{key}.", origin)
        elif spec.section is not None and not (spec.optional and document.is_null(value)):
            raise BevctlError(
                f"{here}: {key} is a section, not a value.", f"Its keys: {', '.join(specs_of(spec.section))}."
            )
        elif spec.is_table:
            if not isinstance(value, MappingNode):
                raise BevctlError(f"{here}: {key} must be a mapping, not a value.", f"{key}: {spec.metadata['help']}.")
            for entry, item, item_line in document.items(value, str(here)):
                yield f"{key}.{entry}", _Entry(item, origin(item_line))
        else:
            yield key, _Entry(value, here)


def _nearest(name: str, prefix: str, specs: Mapping[str, Spec]) -> str:
    """A hint: a sibling that is close, else the same word elsewhere, else the siblings."""
    hint = did_you_mean(name, specs)
    elsewhere = [key for key in keys() if key.rpartition(".")[2] == name]
    if hint.startswith("Did") or not elsewhere:
        return hint.replace("Did you mean '", f"Did you mean '{prefix}")
    return f"Did you mean {' or '.join(repr(key) for key in elsewhere[:3])}?"


def keys(section: type = Config, prefix: str = "") -> list[str]:
    """The dotted keys of every value of a config."""
    found: list[str] = []
    for name, spec in specs_of(section).items():
        key = prefix + name
        found.extend(keys(spec.section, f"{key}.") if spec.section else [key])
    return found


def _overlay(entries: _Entries, layer: Iterator[tuple[str, _Entry]] | list[tuple[str, _Entry]]) -> None:
    """Put a stronger layer on `entries`: a value replaces the value or section of its key; a null section ends."""
    for key, entry in layer:
        for above in _ancestors(key):
            if above in entries and document.is_null(entries[above].node):
                del entries[above]
        if isinstance(entry.node, MappingNode):
            if key in entries and document.is_null(entries[key].node):
                del entries[key]
            entries.setdefault(key, entry)
            continue
        for below in [other for other in entries if other.startswith(f"{key}.")]:
            del entries[below]
        entries[key] = entry


def _ancestors(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _overridden(entries: _Entries, layer: list[tuple[str, _Entry]]) -> Iterator[str]:
    for key, entry in layer:
        old = entries.get(key)
        if old and old.origin.kind == "set" and not isinstance(entry.node, MappingNode):
            yield f"{entry.origin} overrides {old.origin}."


def _resolve(entries: _Entries) -> tuple[Config, dict[str, Origin]]:
    origins: dict[str, Origin] = {}
    config: Config = _build(Config, "", entries, origins)
    for problem in rules.problems(config):
        origin = origins.get(problem.key, Origin("default"))
        where = "" if origin.kind == "default" else f"{origin}: "
        raise BevctlError(f"{where}{problem.message}", problem.hint)
    return config, origins


def _build(section: type, prefix: str, entries: _Entries, origins: dict[str, Origin]) -> Any:
    values = {}
    for name, spec in specs_of(section).items():
        key = prefix + name
        entry = entries.get(key)
        below = [other for other in entries if other.startswith(f"{key}.")]
        if spec.is_table:
            values[name] = {other.removeprefix(f"{key}."): _value(other, spec, entries, origins) for other in below}
        elif spec.section and (below or (entry is None and spec.default is not None) or _opens(entry)):
            values[name] = _build(spec.section, f"{key}.", entries, origins)
        elif entry is None:
            values[name] = spec.default
            origins[key] = Origin("default")
        else:
            values[name] = _value(key, spec, entries, origins)
    return section(**values)


def _opens(entry: _Entry | None) -> bool:
    return entry is not None and isinstance(entry.node, MappingNode)


def _value(key: str, spec: Spec, entries: _Entries, origins: dict[str, Origin]) -> Any:
    entry = entries[key]
    origins[key] = entry.origin
    if spec.section:
        return None
    if spec.is_table:
        spec = dataclasses.replace(spec, hint=str)
    return convert(entry.node, spec, key, str(entry.origin))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
