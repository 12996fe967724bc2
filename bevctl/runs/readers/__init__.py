"""Readers of training logs: READERS, one file a format.

A new format is a module with `recognises`, `stamp` where its lines have a time, and a `Parser`, and a line in READERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bevctl.runs.collect import Collector
from bevctl.runs.readers import (
    bevctl_jsonl,
    generic,
    mmcv_json,
    mmcv_text,
    mmengine_json,
    mmengine_text,
    openpcdet,
)
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.openmmlab_text import Grammar, OpenMMLabText
from bevctl.runs.readers.text import Place


class Parser(Protocol):
    """Reads one run's lines, in order, and reports to a Collector. No line makes it raise."""

    def feed(self, lines: list[str], number: int) -> None:
        """Takes whole lines without their ends; `number` (1-based) is the first one's."""

    def feed_torn(self, line: str, number: int) -> bool:
        """Takes the last line of a file, which has no end and may be half of one.

        Returns whether something was told of it that would be told again when it is whole.
        """

    def jump(self, place: Place) -> None:
        """The next line is not the one after the last: another file, or another part of it."""

    def finish(self) -> None:
        """There is nothing more for now."""


@dataclass(frozen=True)
class Reader:
    """How one format is told from others and read."""

    recognises: Callable[[str], float]
    """How sure a line is this format's: 1 (can be no other's) to 0."""
    parser: Callable[[Collector, Clock, Place], Parser]
    stamp: Callable[[str, Clock], float | None] | None = None
    """Unix time of a line that has one; None for formats without clock times."""


def _openmmlab(grammar: Grammar) -> Reader:
    return Reader(grammar.recognises, partial(OpenMMLabText, grammar=grammar), grammar.stamp)


READERS = {
    "bevctl": Reader(bevctl_jsonl.recognises, bevctl_jsonl.BevctlLines, bevctl_jsonl.stamp),
    "mmcv-text": _openmmlab(mmcv_text.GRAMMAR),
    "mmcv-json": Reader(mmcv_json.recognises, mmcv_json.MmcvJson),
    "mmengine-text": _openmmlab(mmengine_text.GRAMMAR),
    "mmengine-json": Reader(mmengine_json.recognises, mmengine_json.MmengineJson),
    "openpcdet": Reader(openpcdet.recognises, openpcdet.OpenPCDet, openpcdet.stamp),
    "generic": Reader(generic.recognises, generic.Generic, generic.stamp),
}
"""Line formats by the name that `source.format` has in JSON; `tensorboard` files are no lines and are told by their
first bytes (see `bevctl.runs.readers.tensorboard`)."""


def detect(lines: Iterable[str]) -> tuple[str, float]:
    """The format of a log by a sample of its lines, and how much speaks for it; `generic` where nothing does."""
    scores = dict.fromkeys(READERS, 0.0)
    for line in lines:
        for name, reader in READERS.items():
            scores[name] += reader.recognises(line)
    best = max(scores, key=lambda name: scores[name])
    return (best, scores[best]) if scores[best] > 0 else ("generic", 0.0)
