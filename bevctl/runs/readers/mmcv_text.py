"""Text logs of mmcv 1.x (mmdet, mmdet3d, mit-bevfusion with torchpack) and bevctl's own log.txt."""

from __future__ import annotations

import re

from bevctl.runs.readers.openmmlab_text import Grammar

_STAMP = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})"
_LOGGER = r"(?: - \S+ - | \| [^|]+\| *)"
"""mmcv's logger, or torchpack's."""

GRAMMAR = Grammar(
    train=rf"(?:{_STAMP}{_LOGGER}[A-Z]+(?: - | *\| ))?"
    r"(?:Epoch \[(\d{1,9})\]\[ *(\d{1,9})/(\d{1,9})\]|Iter \[ *(\d{1,12})/(\d{1,12})\])\s+(?=\S)",
    message=re.compile(rf"{_STAMP}{_LOGGER}([A-Z]+)(?: - ?| *\| )(.*)", re.ASCII),
    scores=re.compile(r"(?:Epoch\(val\) \[(\d{1,9})\]|Iter\(val\) )\[(\d{1,12})(?:/(\d{1,12}))?\]\s+(.*)", re.ASCII),
    train_text=("Epoch [", "Iter ["),
)
