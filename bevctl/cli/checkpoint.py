"""`bevctl checkpoint`: what a checkpoint file holds, and whether it is worth continuing from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import json_option
from bevctl.console import Console, table
from bevctl.errors import ExitCode

if TYPE_CHECKING:
    from bevctl.engine.checkpoint_report import CheckpointReport


@click.group("checkpoint")
def command() -> None:
    """Show or verify a checkpoint of bevctl, mit-bevfusion, mmcv, mmengine or mmdet3d.

    The file is read as data: nothing that it names is ever executed.
    """


@command.command("show")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def show(console: Console, file: Path) -> ExitCode:
    """Say what FILE holds: who wrote it, how far training was, its parts, optimizer and loss scale.

    Exits 1 for a broken file.
    """
    report = _inspect(file)
    if report.checkpoint is not None:
        for line in _summary(report):
            console.result(line)
        rows = [(part, entries, values) for part, (entries, values) in report.parts.items()]
        console.result(table(["part", "entries", "values"], rows))
    return _tell(console, report)


@command.command("verify")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@json_option
@click.pass_obj
def verify(console: Console, file: Path) -> ExitCode:
    """Check that FILE is whole (checksums), plain data, and finite: weights, BatchNorm statistics, optimizer state.

    Exits 1 for a broken file.
    """
    report = _inspect(file)
    code = _tell(console, report)
    if not report.is_broken:
        console.result(f"{file}: ok, {len(report.parts)} parts, {_position(report)}")
    return code


def _inspect(file: Path) -> CheckpointReport:
    from bevctl.engine.checkpoint_report import inspect_checkpoint

    return inspect_checkpoint(file)


def _tell(console: Console, report: CheckpointReport) -> ExitCode:
    for finding in report.findings:
        console.result(f"{finding.severity.value} {finding.id}: {finding.title}")
        if finding.severity != "info":
            for evidence in finding.evidence[:8]:
                console.result(f"  {evidence.where}: {evidence.what}")
            for line in (finding.cause, finding.fix):
                if line:
                    console.result(f"  {line}")
    console.document("checkpoint", _body(report), "broken" if report.is_broken else "ok")
    return ExitCode.FINDINGS if report.is_broken else ExitCode.OK


def _position(report: CheckpointReport) -> str:
    assert report.checkpoint is not None
    epoch, iteration = report.checkpoint.epoch, report.checkpoint.iteration
    return f"{report.layout} layout, epoch {_or_unknown(epoch)}, iteration {_or_unknown(iteration)}"


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _summary(report: CheckpointReport) -> list[str]:
    checkpoint = report.checkpoint
    assert checkpoint is not None
    optimizer = checkpoint.content.get("optimizer")
    groups = len(optimizer.get("param_groups", [])) if isinstance(optimizer, Mapping) else 0
    states = len(optimizer.get("state") or ()) if isinstance(optimizer, Mapping) else 0
    scaler = report.loss_scaler
    return [
        f"{report.path}: {report.size_bytes / 1e6:,.1f} MB, written by {checkpoint.origin} {_version(checkpoint.meta)}",
        _position(report),
        f"{len(checkpoint.state_dict)} entries, {sum(v for _, v in report.parts.values()):,} values",
        f"optimizer: {states} states in {groups} groups" if optimizer else "optimizer: none",
        f"loss scale: {scaler['scale']}" if scaler else "loss scale: none",
    ]


def _version(meta: Mapping[str, Any]) -> str:
    return str(meta.get("version") or meta.get("mmengine_version") or meta.get("mmcv_version") or "").strip()


def _body(report: CheckpointReport) -> dict[str, Any]:
    checkpoint = report.checkpoint
    return {
        "path": report.path,
        "size_bytes": report.size_bytes,
        "layout": report.layout,
        "epoch": checkpoint.epoch if checkpoint else None,
        "iter": checkpoint.iteration if checkpoint else None,
        "written_by": f"{checkpoint.origin} {_version(checkpoint.meta)}".strip() if checkpoint else None,
        "parts": {part: {"entries": e, "values": v} for part, (e, v) in report.parts.items()},
        "nonfinite": [dataclasses.asdict(entry) for entry in report.nonfinite],
        "loss_scaler": report.loss_scaler,
        "findings": [
            {**dataclasses.asdict(finding), "severity": finding.severity.value} for finding in report.findings
        ],
    }
