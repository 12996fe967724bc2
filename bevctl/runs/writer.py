"""What a run writes into its folder: run.json, log.jsonl, log.txt and events.jsonl."""

from __future__ import annotations

import dataclasses
import datetime
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from bevctl.console import strict_json
from bevctl.files import atomic_write_text
from bevctl.runs.records import EventRecord, StepRecord

SCHEMA = "bevctl.run/1"


class RunWriter:
    """Appends the records of one run to its folder; a resumed run goes on in the same files."""

    def __init__(self, work_dir: Path, log_interval: int) -> None:
        work_dir.mkdir(parents=True, exist_ok=True)
        self.work_dir = work_dir
        self.document = read_run(work_dir)
        self._log_interval = log_interval
        self._steps = (work_dir / "log.jsonl").open("a", encoding="utf-8")
        self._events = (work_dir / "events.jsonl").open("a", encoding="utf-8")
        self._text = (work_dir / "log.txt").open("a", encoding="utf-8")
        self._window: list[StepRecord] = []

    def step(self, record: StepRecord, inner: int, iters_per_epoch: int) -> str | None:
        """Writes one iteration, the `inner`-th (1-based) of its epoch.

        Returns the text line, where one was due: every `log_interval` iterations and at the end of the epoch.
        """
        _append(self._steps, _compact(record))
        self._window.append(record)
        if inner % self._log_interval and inner != iters_per_epoch:
            return None
        line = train_line(self._window, inner, iters_per_epoch)
        self._window = []
        self.text(line)
        return line

    def event(self, record: EventRecord) -> None:
        """Writes an event, also as a line of log.txt."""
        _append(self._events, _compact(record))
        self.text(record.message)

    def text(self, message: str) -> None:
        """A line of log.txt as mmcv's logger formats it."""
        now = datetime.datetime.now()
        stamp = f"{now:%Y-%m-%d %H:%M:%S},{now.microsecond // 1000:03d}"
        self._text.write(f"{stamp} - bevctl - INFO - {message}\n")
        self._text.flush()

    def update(self, **fields: Any) -> None:
        """Changes entries of run.json."""
        self.document.update(fields)
        self.document["updated"] = time.time()
        atomic_write_text(self.work_dir / "run.json", json.dumps(strict_json(self.document), indent=2) + "\n")

    def close(self) -> None:
        for file in (self._steps, self._events, self._text):
            file.close()


def read_run(work_dir: Path) -> dict[str, Any]:
    """run.json of a folder; an empty run where there is none, or it cannot be read."""
    empty: dict[str, Any] = {"schema": SCHEMA, "status": "new", "segments": [], "checkpoints": [], "best": None}
    try:
        document = json.loads((work_dir / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return empty
    return {**empty, **document} if isinstance(document, dict) else empty


def _append(file: TextIO, record: Mapping[str, Any]) -> None:
    file.write(json.dumps(strict_json(record), allow_nan=False) + "\n")
    file.flush()


def _compact(record: StepRecord | EventRecord) -> dict[str, Any]:
    """The record's fields without those that were not measured."""
    return {key: value for key, value in dataclasses.asdict(record).items() if value is not None and value != {}}


def train_line(window: list[StepRecord], inner: int, iters_per_epoch: int) -> str:
    """The train line of mmcv's text logger for the mean over `window`; memory is in MiB as there."""
    last = window[-1]
    means = _means(window)
    parts = [f"lr: {last.lr or 0:.3e}"]
    if last.eta_s is not None:
        parts.append(f"eta: {datetime.timedelta(seconds=int(last.eta_s))}")
    parts += [f"time: {means['iter_time_s']:.3f}", f"data_time: {means['data_time_s']:.3f}"]
    if last.memory_gib is not None:
        parts.append(f"memory: {last.memory_gib * 1024:.0f}")
    parts += [f"{name}: {means[name]:.4f}" for name in last.losses]
    parts += [f"loss: {means['loss']:.4f}", f"grad_norm: {means['grad_norm']:.4f}"]
    if last.loss_scale is not None:
        parts.append(f"loss_scale: {last.loss_scale:.10g}")
    if last.skipped_steps is not None:
        parts.append(f"skipped_steps: {last.skipped_steps}")
    return f"Epoch [{last.epoch}][{inner}/{iters_per_epoch}]\t{', '.join(parts)}"


def _means(window: list[StepRecord]) -> dict[str, float]:
    names = ("iter_time_s", "data_time_s", "loss", "grad_norm")
    columns = {name: [getattr(r, name) or 0.0 for r in window] for name in names}
    columns |= {name: [r.losses.get(name, 0.0) for r in window] for name in window[-1].losses}
    return {name: sum(values) / len(values) for name, values in columns.items()}
