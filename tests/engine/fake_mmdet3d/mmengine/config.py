"""Configs: Python files that are run, with `custom_imports`."""

from __future__ import annotations

import importlib
import runpy
from typing import Any


class ConfigDict(dict[str, Any]):
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to_dict(self) -> dict[str, Any]:
        return _plain(self)


class Config(ConfigDict):
    @staticmethod
    def fromfile(path: str) -> Config:
        values = {k: v for k, v in runpy.run_path(path).items() if not k.startswith("__")}
        for name in values.get("custom_imports", {}).get("imports", []):
            importlib.import_module(name)
        return Config({key: _wrapped(value) for key, value in values.items()})

    @property
    def pretty_text(self) -> str:
        return repr(self.to_dict())


def _wrapped(value: Any) -> Any:
    if isinstance(value, dict):
        return ConfigDict({key: _wrapped(item) for key, item in value.items()})
    return [_wrapped(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
