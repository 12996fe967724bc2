"""What bevctl notes beside a log: run.json, and config.yaml and the ranks' last words of its own runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bevctl.runs.heartbeat import read_beats
from bevctl.runs.layout import is_count
from bevctl.runs.records import RunLog
from bevctl.runs.writer import read_run


def read_own_header(folder: Path, log: RunLog) -> None:
    """Fills the header of `log` and how long the run is. Files that are missing or broken leave it as it was."""
    document = read_run(folder)
    log.header["meta"] = document
    log.iters_per_epoch = _count(document.get("iters_per_epoch"))
    log.max_iters = _count(document.get("total_iters"))
    if log.iters_per_epoch and log.max_iters:
        log.max_epochs = -(-log.max_iters // log.iters_per_epoch)
    for name in ("name", "host"):
        if isinstance(document.get(name), str):
            log.header[name] = document[name]
    log.header["work_dir"] = str(folder)
    log.beats = read_beats(folder, document)
    segments = [segment for segment in document["segments"] if isinstance(segment, dict)]
    if segments:
        _from_segment(segments[-1], log)
    try:
        log.header["config"] = (folder / "config.yaml").read_text(encoding="utf-8", errors="replace")
    except OSError:
        log.notes.append(f"{folder / 'config.yaml'} cannot be read: what the run was asked for is not known.")


def read_launch(folder: Path, log: RunLog) -> None:
    """Notes in the header, as `launched`, the run.json of a run that bevctl had another project's program train."""
    document = read_run(folder) if folder.is_dir() and log.format != "bevctl" else {}
    if document.get("engine") == "external":
        log.header["launched"] = document


def _from_segment(segment: dict[str, Any], log: RunLog) -> None:
    precision, versions = segment.get("precision"), segment.get("versions")
    if isinstance(precision, str):
        log.header["precision"] = {
            "fp16": precision == "fp16",
            "loss_scale": segment.get("loss_scale"),
            "name": precision,
        }
    env = {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}
    if "device" in segment:
        env["device"] = str(segment["device"])
    log.header["env"] = env


def _count(value: object) -> int | None:
    return value if is_count(value) and value else None
