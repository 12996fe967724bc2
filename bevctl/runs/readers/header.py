"""What a log says of its run before the first iteration: environment, config, and what they tell of precision."""

from __future__ import annotations

import re
from typing import Any

_LONGEST = 2_000_000
_ENVIRONMENT = "System environment:"
"""mmengine's block has a message of its own without a title."""
_ENV_LINE = re.compile(r"\s*([A-Za-z][\w .,]{0,60}?):\s+(\S.*)")
_MAX_EPOCHS = re.compile(r"\b(?:max_epochs|total_epochs|num_epochs)['\"]?\s*[=:]\s*(\d+)")
_MAX_ITERS = re.compile(r"\b(?:max_iters|total_iters)['\"]?\s*[=:]\s*(\d+)")
_HALF = re.compile(
    r"^\s*fp16\s*=(?!\s*(?:None|False))|^\s*fp16:(?!\s*(?:null|~|false))|Fp16OptimizerHook|AmpOptimWrapper|"
    r"use_amp['\"]?\s*[=: ]\s*True|precision:\s*fp16",
    re.MULTILINE,
)
_FULL = re.compile(r"^\s*fp16\s*=\s*(?:None|False)|^\s*fp16:\s*(?:null|~|false)|use_amp\s+False", re.MULTILINE)
_SCALE = re.compile(r"\bloss_scale['\"]?\s*[=:]\s*['\"]?(\d+\.?\d*(?:e[+-]?\d+)?)")


def parse_env(text: str) -> dict[str, str]:
    """The `key: value` lines of an environment block."""
    pairs = (_ENV_LINE.match(line) for line in text.splitlines())
    return {match[1].strip(): match[2].strip() for match in pairs if match}


def precision_of(config: str) -> dict[str, Any]:
    """What a foreign config says of precision.

    Returns `fp16` (None where it says nothing) and `loss_scale` (`dynamic`, a number or None).
    """
    half = bool(_HALF.search(config))
    fp16 = True if half else False if _FULL.search(config) else None
    found = _SCALE.search(config)
    scale = float(found[1]) if found is not None else "dynamic"
    return {"fp16": fp16, "loss_scale": scale if half else None}


def limits_of(config: str) -> tuple[int | None, int | None]:
    """Epochs and iterations that a foreign config asks for."""
    epochs, iterations = _MAX_EPOCHS.search(config), _MAX_ITERS.search(config)
    return epochs and int(epochs[1][:9]), iterations and int(iterations[1][:9])


class Dump:
    """A block of lines below `Config:` or the like, up to the next line with a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lines: list[str] = []
        self._size = 0

    def add(self, line: str) -> None:
        """Takes a line; of a block without end only the first megabytes are kept."""
        self._size += len(line) + 1
        if self._size <= _LONGEST:
            self._lines.append(line)

    def close(self, header: dict[str, Any]) -> None:
        """Puts what was read into the log's `header`."""
        text = "\n".join(self._lines).strip("\n")
        if self.name == "env" or _ENVIRONMENT in text[:500]:
            header.setdefault("env", {}).update(parse_env(text))
        elif self.name == "config":
            set_config(header, text)


def set_config(header: dict[str, Any], text: str) -> None:
    """Keeps the config and what follows from it."""
    header["config"] = text
    header["precision"] = precision_of(text)
