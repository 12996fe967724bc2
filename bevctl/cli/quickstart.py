"""`bevctl quickstart`: from nothing to a trained, resumed and evaluated model."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from bevctl.cli.options import json_option
from bevctl.console import Console

if TYPE_CHECKING:
    from bevctl.quickstart import Summary


@click.command("quickstart")
@click.argument("folder", metavar="[DIR]", default="bevctl-quickstart", type=click.Path(file_okay=False))
@click.option(
    "--model",
    type=click.Choice(["bevfusion", "petrv2"]),
    default="bevfusion",
    show_default=True,
    help="What is trained: config tiny, or petrv2_tiny.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute; default: auto."
)
@json_option
@click.pass_obj
def command(console: Console, folder: str, model: str, device: str) -> None:
    """Make a small data set, train a small model on it, resume, evaluate and draw, all in DIR.

    Needs no GPU and no data, and takes less than 8 minutes on two cores. A second call uses the data set again and
    starts a new run beside the first.
    """
    from pathlib import Path

    from bevctl.quickstart import Quickstart

    quickstart = Quickstart(Path(folder), device, console, model)
    summary = quickstart.run()
    console.document("quickstart", summary.document())
    seconds = sum(step.seconds for step in summary.steps)
    trained = f"{quickstart.config} --set {shlex.quote(f'data.root={quickstart.data}')}"
    console.result(
        f"\nloss, mean of ten steps: {summary.first_loss:.3f} at first, {summary.last_loss:.3f} at last "
        f"({summary.last_loss / summary.first_loss:.2f} of it)\n"
        f"mAP on held-out scenes:  {summary.untrained.mAP:.3f} untrained, {summary.trained.mAP:.3f} trained\n"
        f"{_of_map(summary)}"
        f"run: {summary.run}   pictures: {quickstart.pictures}   {seconds:.0f} s in all\n\n"
        "Next:\n"
        f"  bevctl train {trained} --epochs 20 --work-dir {shlex.quote(f'{folder}/longer')}\n"
        f"  bevctl eval {trained} --checkpoint {shlex.quote(f'{summary.run}/latest')}\n"
        "  bevctl data prepare --root data/nuscenes --version v1.0-trainval   # with real nuScenes data\n"
        f"  bevctl train {quickstart.real_config} --gpus 8"
    )


def _of_map(summary: Summary) -> str:
    before, after = summary.untrained.mIoU, summary.trained.mIoU
    if before is None or after is None:
        return ""
    return f"mIoU of the map:         {before:.3f} untrained, {after:.3f} trained\n"
