"""Registries: names of classes, built from a dict with `type`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Registry:
    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def register_module(self) -> Callable[[Any], Any]:
        def remember(item: Any) -> Any:
            self._known[item.__name__] = item
            return item

        return remember

    def get(self, name: str) -> Any:
        return self._known.get(name)

    def build(self, config: dict[str, Any]) -> Any:
        options = dict(config)
        name = options.pop("type")
        if name not in self._known:
            raise KeyError(f"{name} is not in the registry")
        return self._known[name](**options)


FUNCTIONS = Registry()


def init_default_scope(scope: str) -> None:
    del scope
