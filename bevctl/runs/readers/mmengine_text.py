"""Text logs of mmengine: its file, and its console as nohup captures it (without a year)."""

from __future__ import annotations

import re

from bevctl.runs.readers.openmmlab_text import Grammar

_STAMP = r"((?:\d{4}/)?\d\d/\d\d \d\d:\d\d:\d\d)"
_PLACE = r"\[ *(\d{1,12})/ *(\d{1,12})\]"

GRAMMAR = Grammar(
    train=rf"(?:{_STAMP} - \S+ - [A-Z]+ - )?(?:Epoch\(train\) +\[ *(\d{{1,9}})\]{_PLACE}|Iter\(train\) +{_PLACE})"
    r"\s+(?=\S)",
    message=re.compile(rf"{_STAMP} - \S+ - ([A-Z]+) - ?(.*)", re.ASCII),
    scores=re.compile(rf"(?:Epoch|Iter)\((?:val|test)\) +(?:\[ *(\d{{1,9}})\])?{_PLACE}\s+(.*)", re.ASCII),
    train_text=("Epoch(train)", "Iter(train)"),
)
