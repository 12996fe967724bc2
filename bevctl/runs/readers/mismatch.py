"""Checkpoints that do not fit the model, as mmcv and PyTorch print them."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from bevctl.runs.collect import Collector

_SIZE = re.compile(r"size mismatch for ([\w.]+): copying a param with shape")
_LIST = re.compile(r"(unexpected|missing|Unexpected|Missing) keys?(?:\(s\))? in (?:source )?state_dict: (.*)")
_DIFFERENT = "The model and loaded state dict do not match exactly"


class MismatchScanner:
    """Gathers the lines about one checkpoint into one event, `checkpoint_mismatch`.

    Its data: `size_mismatch`, `unexpected` and `missing` (numbers of keys), and `prefixes`: for each of these, how many
    keys begin with which two parts of a name.
    """

    def __init__(self) -> None:
        self._data: dict[str, Any] | None = None

    def scan(self, line: str, out: Collector, where: str) -> bool:
        """Whether the line belongs to such a report."""
        if _DIFFERENT in line:
            self._data = None
            self._record(out, where)
            return True
        size, keys = _SIZE.search(line), _LIST.search(line)
        if size is not None:
            self._add("size_mismatch", [size[1]], out, where)
        elif keys is not None:
            names = [name.strip(" \"'.") for name in keys[2].split(",")]
            self._add(keys[1].lower(), [name for name in names if name], out, where)
        else:
            return False
        return True

    def _add(self, kind: str, names: list[str], out: Collector, where: str) -> None:
        data = self._record(out, where)
        data[kind] = data.get(kind, 0) + len(names)
        prefixes = Counter(".".join(name.split(".")[:2]) for name in names)
        known = Counter(data["prefixes"].get(kind, {})) + prefixes
        data["prefixes"][kind] = dict(known.most_common(20))

    def _record(self, out: Collector, where: str) -> dict[str, Any]:
        if self._data is None:
            message = "The checkpoint's weights do not match the model's"
            self._data = out.event("checkpoint_mismatch", message, where, prefixes={}).data
        return self._data
