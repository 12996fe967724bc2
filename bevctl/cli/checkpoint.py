"""`bevctl checkpoint`: what a checkpoint file holds, whether it is worth continuing from, and other layouts of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import CommandGroup, json_option
from bevctl.console import Console, table
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from bevctl.engine.checkpoint import Checkpoint
    from bevctl.engine.checkpoint_convert import Conversion
    from bevctl.engine.checkpoint_report import CheckpointReport


@click.group("checkpoint", cls=CommandGroup)
def command() -> None:
    """Show, verify or convert a checkpoint of bevctl, mit-bevfusion, mmcv, mmengine, mmdet3d or PETR.

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


@command.command("convert")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "layout",
    required=True,
    type=click.Choice(["bevctl", "mit", "mmdet3d", "petr"]),
    help="Layout to write.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="OUT", help="Default: FILE_TO.pth beside FILE."
)
@click.option(
    "--config",
    "config_name",
    metavar="CONFIG",
    help="The model that the weights belong to: checked, and kept in the file, so that eval needs no CONFIG.",
)
@click.option(
    "--min-loaded",
    type=click.FloatRange(0, 1),
    default=1.0,
    metavar="SHARE",
    help="Least share of CONFIG's entries that FILE must have; default: 1, all.",
)
@click.option(
    "--boxes",
    type=click.Choice(["auto", "lwh", "wlh"]),
    default="auto",
    help="Boxes of FILE's detection head: l, w, h, yaw, or w, l, h, -yaw - pi/2; auto: by its layout.",
)
@click.option("--task", type=click.Choice(["object", "map"]), help="Write one head alone, with its decoder.")
@click.option("--yes", is_flag=True, help="Replace OUT if it exists.")
@click.option("-n", "--dry-run", is_flag=True, help="Say what would be written, and write nothing.")
@json_option
@click.pass_obj
def convert(
    console: Console,
    file: Path,
    layout: str,
    out: Path | None,
    config_name: str | None,
    min_loaded: float,
    boxes: str,
    task: str | None,
    yes: bool,
    dry_run: bool,
) -> ExitCode:
    """Write the weights of FILE for bevctl, mit-bevfusion, mmdet3d's BEVFusion or PETR's PETRv2.

    The box convention changes with the layout. For bevctl, epoch, loss scale and optimizer state are kept too.
    """
    from bevctl.config.load import load
    from bevctl.engine.checkpoint import read_checkpoint, write_checkpoint
    from bevctl.engine.checkpoint_convert import Target, convert_checkpoint

    path = out or file.with_name(f"{file.stem}_{layout}.pth")
    _check_free(path, file, yes or dry_run)
    config = load(config_name).config if config_name is not None else None
    conversion = convert_checkpoint(read_checkpoint(file), Target(layout, boxes, task, config, min_loaded))
    if not dry_run:
        write_checkpoint(path, conversion.content, "Free some space, or choose another --out.")
    _tell_conversion(console, conversion, file, layout, path, dry_run)
    return ExitCode.OK


def _check_free(path: Path, file: Path, may_replace: bool) -> None:
    if not path.parent.is_dir():
        raise BevctlError(f"There is no folder {path.parent}.", "Make it, or choose another --out.")
    if path.exists() and file.exists() and path.samefile(file):
        raise BevctlError(f"--out {path} is FILE itself.", "Choose another name: the original stays.")
    if path.exists() and not may_replace:
        raise BevctlError(f"{path} exists.", "Choose another --out, or replace it with --yes.", ExitCode.FINDINGS)


def _tell_conversion(
    console: Console, conversion: Conversion, file: Path, layout: str, path: Path, dry_run: bool
) -> None:
    by_part = conversion.report.by_part() if conversion.report is not None else conversion.parts
    columns = list(next(iter(by_part.values())))
    rows = [(part, *(counts[column] for column in columns)) for part, counts in by_part.items()]
    console.result(table(["part", *columns], rows))
    for note in conversion.notes:
        console.result(f"{note}.")
    total = len(conversion.content["state_dict"])
    what = f"{total} entries, {conversion.layout} layout to {layout}"
    console.result(f"{path}: {what}" + (" (not written)" if dry_run else ""))
    body = {
        "path": path,
        "source": file,
        "from": conversion.layout,
        "to": layout,
        "entries": total,
        "parts": conversion.parts,
        "fit": conversion.report.by_part() if conversion.report is not None else None,
        "notes": conversion.notes,
        "written": not dry_run,
    }
    console.document("checkpoint", body, "ok")


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
        f"{report.path}: {report.size_bytes / 1e6:,.1f} MB, {_origin(checkpoint)}",
        _position(report),
        f"{len(checkpoint.state_dict)} entries, {sum(v for _, v in report.parts.values()):,} values",
        f"optimizer: {states} states in {groups} groups" if optimizer else "optimizer: none",
        f"loss scale: {scaler['scale']}" if scaler else "loss scale: none",
    ]


def _origin(checkpoint: Checkpoint) -> str:
    if checkpoint.origin == "weights":
        return "weights alone, which do not say who wrote them"
    return f"written by {checkpoint.origin} {_version(checkpoint.meta)}".strip()


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
