"""`bevctl bench`: what a training step costs in each precision."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import (
    ConfigRequest,
    config_option,
    config_options,
    engine_option,
    grad_checkpoint_option,
    json_option,
)
from bevctl.cli.overrides import ConfigCommand
from bevctl.cli.values import OUTPUT_FILE
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    import torch

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
STEPS_ON_GPU, STEPS_ON_CPU = 20, 4


class Percentage(click.ParamType):
    """`5%` or `0.05`."""

    name = "percentage"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            self.fail(f"{value!r} is not a percentage such as 5%.", param, ctx)
        return number


@click.command("bench", cls=ConfigCommand)
@config_options
@engine_option("bevctl", "mmdet3d")
@config_option("--batch", key="train.batch", type=click.IntRange(1), metavar="N", help="Samples a step.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps timed; default: 20 on a GPU, 4 on a CPU.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(PRECISIONS),
    help="Measure only this; repeatable. tf32: FP32 with TF32 on. Default: all that the device is made for.",
)
@config_option("--compile", key="train.compile", is_flag=True, help="torch.compile for the parts of fixed shape.")
@grad_checkpoint_option
@click.option("--png", type=OUTPUT_FILE, metavar="FILE", help="Draw the result.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="A.json B.json",
    help="Measure nothing: compare two earlier --json documents, B against A.",
)
@click.option(
    "--max-regression",
    type=Percentage(),
    default="5%",
    show_default=True,
    metavar="PERCENT",
    help="With --compare: exit 1 beyond it.",
)
@json_option
@click.pass_obj
def command(
    console: Console,
    request: ConfigRequest,
    steps: int | None,
    precisions: tuple[str, ...],
    png: Path | None,
    compare: tuple[Path, Path] | None,
    max_regression: float,
) -> int:
    """Time a training step of CONFIG in FP32 (TF32 off and on), FP16 and BF16, with equal seeds and batches.

    Shows time by part, memory, the share of the hardware's matrix speed that is used, and how far the losses differ.
    Batches are from the config's data set, or made in memory at the real sensors' size where there is none.
    """
    if compare is not None:
        return _compare(console, *compare, max_regression)
    config = request.load().config

    from bevctl.engine.dist import select_device
    from bevctl.measure.bench import bench, default_precisions
    from bevctl.measure.bench_text import tables

    device = select_device(config.device)
    wanted = tuple(dict.fromkeys(precisions)) or default_precisions(device)
    _refuse_tf32_without_gpu(wanted, device)
    report = bench(
        config, wanted, device, steps or (STEPS_ON_GPU if device.type == "cuda" else STEPS_ON_CPU), console.info
    )
    for shown in tables(report):
        console.result(shown)
    if png is not None:
        from bevctl.measure.bench_picture import save

        save(report, png)
        console.info(f"Drawn: {png}")
    console.document("bench", report.document())
    return ExitCode.OK


def _refuse_tf32_without_gpu(precisions: tuple[str, ...], device: torch.device) -> None:
    if "tf32" in precisions and device.type != "cuda":
        raise BevctlError("A CPU has no TF32.", "Measure fp32 or bf16, or use --device cuda.")


def _compare(console: Console, before: Path, after: Path, limit: float) -> int:
    from bevctl.measure.bench_compare import compare
    from bevctl.measure.bench_text import comparison_table

    comparison = compare(before, after)
    for note in comparison.notes:
        console.warn(note)
    console.result(comparison_table(comparison, limit))
    worse = comparison.regressions(limit)
    changes = [{**vars(c), "change": c.change, "regression": c in worse} for c in comparison.changes]
    body = {"before": before, "after": after, "max_regression": limit, "changes": changes, "notes": comparison.notes}
    console.document("bench", body, "fail" if worse else "pass")
    return ExitCode.FINDINGS if worse else ExitCode.OK
