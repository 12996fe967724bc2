"""Working out simple Python expressions of foreign configs from their syntax tree; nothing is ever executed.

Known are literals, names, items and attributes of mappings, arithmetic, comparisons, f-strings, comprehensions, and a
few harmless functions. Anything else, and anything that would grow too large, becomes an `Unresolved`.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bevctl.config.foreign_values import Section, Unresolved
from bevctl.config.layers import Origin

MAX_STEPS = 200_000
"""Nodes worked out for one config."""
MAX_SIZE = 10_000
"""Elements of a list, or characters of a text, that an operation may make."""
MAX_NUMBER = 10**30

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        len, int, float, str, bool, list, tuple, set, min, max, sum, abs, round, sorted, enumerate, zip, range
    )
}  # fmt: skip
_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("get", "keys", "values", "items", "copy"),
    list: ("copy", "index", "count"),
    tuple: ("index", "count"),
    str: ("join", "split", "strip", "upper", "lower", "replace", "startswith", "endswith"),
}
_PLAIN = (int, float, complex, str, bool, list, tuple, set, dict, type(None))


class CannotResolve(Exception):
    """Why an expression was not worked out."""


class Evaluator:
    """Works out expressions over `names`; `origin` says where a line is."""

    def __init__(self, names: Mapping[str, Any], origin: Callable[[int], Origin]) -> None:
        self.names = names
        self.origin = origin
        self._steps = 0

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or an `Unresolved` in its place."""
        named = self.names.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(named, Unresolved):
            return named
        try:
            return self.resolve(node)
        except (CannotResolve, RecursionError) as error:
            reason = str(error) if isinstance(error, CannotResolve) else "nested too deeply"
            return Unresolved(_text(node), reason)

    def resolve(self, node: ast.expr) -> Any:
        """The value of an expression. Raises CannotResolve."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise CannotResolve("too much to work out")
        rule = _RULES.get(type(node))
        if rule is None:
            raise CannotResolve(f"{type(node).__name__} is not worked out")
        try:
            value = rule(self, node)
        except (ArithmeticError, TypeError, ValueError, LookupError, AttributeError, MemoryError) as error:
            raise CannotResolve(f"{type(error).__name__}: {error!s:.60}") from None
        if isinstance(value, Unresolved):
            raise CannotResolve(value.reason)
        return value

    def _constant(self, node: ast.Constant) -> Any:
        return node.value

    def _name(self, node: ast.Name) -> Any:
        if node.id not in self.names:
            raise CannotResolve(f"the name {node.id!r} is not known")
        return self.names[node.id]

    def _attribute(self, node: ast.Attribute) -> Any:
        holder = self.resolve(node.value)
        if not isinstance(holder, dict):
            raise CannotResolve(f"an attribute of a {type(holder).__name__}")
        return holder[node.attr]

    def _subscript(self, node: ast.Subscript) -> Any:
        return self.resolve(node.value)[self._index(node.slice)]

    def _index(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Slice):
            return slice(
                *(None if part is None else self.resolve(part) for part in (node.lower, node.upper, node.step))
            )
        return self.resolve(node)

    def _list(self, node: ast.List | ast.Tuple) -> Any:
        items = list(self._items(node.elts))
        return tuple(items) if isinstance(node, ast.Tuple) else items

    def _set(self, node: ast.Set) -> Any:
        return {self.resolve(item) for item in node.elts}

    def _items(self, nodes: list[ast.expr]) -> Iterator[Any]:
        for node in nodes:
            if isinstance(node, ast.Starred):
                yield from self._checked(self.resolve(node.value))
            else:
                yield self.value(node)

    def _dict(self, node: ast.Dict) -> Any:
        section = Section()
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                self._spread(section, value)
            else:
                section.put(self.resolve(key), self.value(value), self.origin(value.lineno))
        return section

    def _spread(self, section: Section, node: ast.expr) -> None:
        """`**node` inside a mapping."""
        other = Section(self.resolve(node))
        for key, value in other.items():
            section.put(key, value, other.origins.get(key) or self.origin(node.lineno))

    def _binary(self, node: ast.BinOp) -> Any:
        left, right = self.resolve(node.left), self.resolve(node.right)
        if type(node.op) not in _BINARY:
            raise CannotResolve(f"the operator {type(node.op).__name__}")
        if isinstance(node.op, ast.Pow) and not (abs(left) <= 10**6 and abs(right) <= 64):
            raise CannotResolve("a power that large")
        if isinstance(node.op, ast.Mult):
            sizes = [len(v) for v in (left, right) if isinstance(v, str | list | tuple)]
            times = [v for v in (left, right) if isinstance(v, int)]
            if sizes and times and sizes[0] * times[0] > MAX_SIZE:
                raise CannotResolve("a repetition that large")
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            raise CannotResolve("text formatting with %")
        return self._checked(_BINARY[type(node.op)](left, right))

    def _checked(self, value: Any) -> Any:
        too_long = isinstance(value, str | list | tuple | range | dict) and len(value) > MAX_SIZE
        if too_long or (isinstance(value, int) and abs(value) > MAX_NUMBER):
            raise CannotResolve("a value that large")
        return value

    def _unary(self, node: ast.UnaryOp) -> Any:
        if type(node.op) not in _UNARY:
            raise CannotResolve(f"the operator {type(node.op).__name__}")
        return _UNARY[type(node.op)](self.resolve(node.operand))

    def _boolean(self, node: ast.BoolOp) -> Any:
        stop_at = isinstance(node.op, ast.Or)
        value: Any = None
        for item in node.values:
            value = self.resolve(item)
            if bool(value) is stop_at:
                break
        return value

    def _comparison(self, node: ast.Compare) -> Any:
        left = self.resolve(node.left)
        for comparison, item in zip(node.ops, node.comparators, strict=True):
            right = self.resolve(item)
            if not _COMPARE[type(comparison)](left, right):
                return False
            left = right
        return True

    def _choice(self, node: ast.IfExp) -> Any:
        return self.resolve(node.body if self.resolve(node.test) else node.orelse)

    def _text(self, node: ast.JoinedStr) -> Any:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    raise CannotResolve("text formatting")
                parts.append(str(self.resolve(part.value)))
            else:
                parts.append(str(self.resolve(part)))
        return self._checked("".join(parts))

    def _call(self, node: ast.Call) -> Any:
        if isinstance(node.func, ast.Attribute):
            return self._method(node, node.func)
        name = node.func.id if isinstance(node.func, ast.Name) else _text(node.func)
        if name == "dict":
            return self.resolve_dict(node)
        if name not in _FUNCTIONS or name in self.names:
            raise CannotResolve(f"a call of {name}")
        return self._apply(_FUNCTIONS[name], node)

    def resolve_dict(self, node: ast.Call) -> Section:
        """The mapping of a call of `dict`, or of an `update`. Raises CannotResolve."""
        section = Section()
        for argument in node.args:
            self._spread(section, argument)
        for keyword in node.keywords:
            if keyword.arg is None:
                self._spread(section, keyword.value)
            else:
                section.put(keyword.arg, self.value(keyword.value), self.origin(keyword.value.lineno))
        return section

    def _method(self, node: ast.Call, function: ast.Attribute) -> Any:
        holder = self.resolve(function.value)
        for kind, names in _METHODS.items():
            if isinstance(holder, kind) and function.attr in names:
                if isinstance(holder, Section) and function.attr == "copy":
                    return Section(holder)
                return self._apply(getattr(holder, function.attr), node)
        raise CannotResolve(f"a call of {function.attr}")

    def _apply(self, function: Callable[..., Any], node: ast.Call) -> Any:
        arguments = [self._checked(item) for item in self._items(node.args)]
        if any(isinstance(item, Unresolved) for item in arguments):
            raise CannotResolve("an argument is not known")
        named = {keyword.arg: self.resolve(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        if len(named) != len(node.keywords) or "key" in named:
            raise CannotResolve("keywords that are not written out")
        result = self._checked(function(*arguments, **named))
        return result if isinstance(result, _PLAIN) else list(result)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> Any:
        items = [inner.resolve(node.elt) for inner in self._loop(node.generators)]
        return set(items) if isinstance(node, ast.SetComp) else items

    def _dict_comprehension(self, node: ast.DictComp) -> Any:
        section = Section()
        for inner in self._loop(node.generators):
            section.put(inner.resolve(node.key), inner.value(node.value), self.origin(node.lineno))
        return section

    def _loop(self, generators: list[ast.comprehension]) -> Iterator[Evaluator]:
        """An evaluator with the loops' names for each round."""
        if not generators:
            yield self
            return
        first, rest = generators[0], generators[1:]
        for item in self._checked(self.resolve(first.iter)):
            inner = Evaluator({**self.names, **dict(bound(first.target, item))}, self.origin)
            inner._steps = self._steps
            if all(inner.resolve(test) for test in first.ifs):
                yield from inner._loop(rest)
            self._steps = inner._steps + 1
            if self._steps > MAX_STEPS:
                raise CannotResolve("too much to work out")


def parse(source: str, mode: str = "exec") -> ast.AST:
    """The syntax tree of a text, without the warnings that Python has for it.

    Raises SyntaxError, ValueError, RecursionError or MemoryError, as `ast.parse` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes and literals of a foreign project are not our user's business
        return ast.parse(source, mode=mode)


def bound(target: ast.expr, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of each name that an assignment of `value` to `target` sets. Raises CannotResolve."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif (
        isinstance(target, ast.Tuple | ast.List) and isinstance(value, list | tuple) and len(target.elts) == len(value)
    ):
        for element, item in zip(target.elts, value, strict=True):
            yield from bound(element, item)
    else:
        raise CannotResolve("an assignment that is not worked out")


def _text(node: ast.AST) -> str:
    try:
        text = ast.unparse(node)
    except RecursionError:
        return "…"
    return text if len(text) <= 80 else text[:79] + "…"


_RULES: dict[type[ast.expr], Callable[[Evaluator, Any], Any]] = {
    ast.Constant: Evaluator._constant,
    ast.Name: Evaluator._name,
    ast.Attribute: Evaluator._attribute,
    ast.Subscript: Evaluator._subscript,
    ast.List: Evaluator._list,
    ast.Tuple: Evaluator._list,
    ast.Set: Evaluator._set,
    ast.Dict: Evaluator._dict,
    ast.BinOp: Evaluator._binary,
    ast.UnaryOp: Evaluator._unary,
    ast.BoolOp: Evaluator._boolean,
    ast.Compare: Evaluator._comparison,
    ast.IfExp: Evaluator._choice,
    ast.JoinedStr: Evaluator._text,
    ast.Call: Evaluator._call,
    ast.ListComp: Evaluator._comprehension,
    ast.GeneratorExp: Evaluator._comprehension,
    ast.SetComp: Evaluator._comprehension,
    ast.DictComp: Evaluator._dict_comprehension,
}
