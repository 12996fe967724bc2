"""`bevctl memory`: the GPU memory that training takes, predicted or measured, and the settings that fit."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import ConfigRequest, config_option, config_options, engine_option, json_option
from bevctl.cli.overrides import ConfigCommand
from bevctl.cli.values import OUTPUT_FILE
from bevctl.console import Console, table
from bevctl.errors import BevctlError, ExitCode
from bevctl.sizes import format_gib, parse_size

if TYPE_CHECKING:
    from bevctl.config.schema import Config
    from bevctl.measure.memory_plans import Plan
    from bevctl.measure.memory_report import MemoryReport
    from bevctl.measure.step_times import StepTimes

_USABLE = 0.985
"""Share of the GiB on a card's label that programs can use: a V100 of "32 GB" has 31.7 GiB of the 32."""


class CardSize(click.ParamType):
    """`32GB` is what a card sold as that can use; `31GiB` is taken literally."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        if re.fullmatch(r"\s*\d+(?:\.\d+)?\s*", str(value)):
            raise BevctlError(f"--fit {value} has no unit.", f"Write --fit {str(value).strip()}GB.")
        sold = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*G(B?)\s*", str(value))
        size = round(float(sold[1]) * 2**30 * _USABLE) if sold else parse_size(str(value))
        if size < 2**30:
            raise BevctlError(f"A GPU of {value} holds no model.", "Write for example --fit 32GB.")
        return size


@click.command("memory", cls=ConfigCommand)
@config_options
@engine_option("bevctl", "mmdet3d")
@config_option("--batch", key="train.batch", type=click.IntRange(1), metavar="N", help="Samples a GPU and step.")
@click.option("--measure", "measuring", is_flag=True, help="Train a few steps on this GPU, and compare.")
@click.option(
    "--kernels",
    type=click.Choice(["auto", "torch", "triton"]),
    default="auto",
    help="What runs the costly operations: torch on cards before capability 8.0 (V100); default: as BEVCTL_KERNELS or "
    "the GPU here says.",
)
@click.option("--gpus", type=click.IntRange(1), default=1, metavar="N", help="GPUs of the run; default: 1.")
@click.option("--fit", type=CardSize(), metavar="SIZE", help="Choose the plan for a card of this size, such as 32GB.")
@click.option("--plan", metavar="NAME", help="Choose a plan by its name or its letter: A, B, C.")
@click.option(
    "--write",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="With --fit or --plan: write the chosen plan, for train --set FILE.",
)
@click.option(
    "--step-time", type=click.FloatRange(0, min_open=True), metavar="S", help="Seconds of a step as CONFIG is."
)
@click.option(
    "--times",
    type=click.Path(exists=True, path_type=Path),
    metavar="FILE|RUN",
    help="Take step times from a `bench --json` document, or from a run's log.",
)
@click.option("--price", type=click.FloatRange(0), metavar="X", help="Of a GPU for an hour, for the cost of plans.")
@json_option
@click.pass_obj
def command(
    console: Console,
    request: ConfigRequest,
    measuring: bool,
    kernels: str,
    gpus: int,
    fit: int | None,
    plan: str | None,
    write: Path | None,
    step_time: float | None,
    times: Path | None,
    price: float | None,
) -> int:
    """Predict the GPU memory of training CONFIG by part, and of plans: precision, batch, recomputing.

    Needs no GPU; a model of mmdet3d is measured on one instead. Sizes of point clouds are from the config's data set,
    or from streets made in memory without one.
    Plans have times where one is known: from --measure, --step-time or --times, scaled to the other plans.
    """
    if write is not None and fit is None and plan is None:
        raise BevctlError(
            "--write needs to know which plan to write.", "Add --fit with the card's size, as --fit 32GB, or --plan A."
        )
    if step_time is not None and times is not None:
        raise BevctlError("--step-time and --times contradict each other.", "Give one of them.")
    config = request.load().config
    if config.model.mmdet3d is not None:
        return _measure_mmdet3d(console, config)

    from bevctl.engine.dist import select_device
    from bevctl.measure.memory import BASIS, running_on
    from bevctl.measure.memory_plans import plan_called
    from bevctl.measure.memory_report import examine, measure
    from bevctl.measure.memory_text import tables

    wanted = plan_called(plan, config) if plan is not None else None
    compared = measure(config, select_device(config.device), console.info) if measuring else None
    # Plans count with batches, of which a step may have several.
    told = step_time / config.train.accumulate if step_time is not None else None
    seconds = compared.measured.step_s if compared is not None else told
    known = _times(console, config, seconds, times)
    with running_on(kernels):
        report = dataclasses.replace(examine(config, known, gpus, price, fit, console.info), comparison=compared)
    for shown in tables(report):
        console.result(shown)
    console.info(f"{BASIS} Samples: {_describe(report)}.")
    if seconds is not None or times is not None:
        console.info("Times are those of training alone; ~ marks what is scaled from a measured setting.")
    chosen = report.chosen if wanted is None else next(p for p in report.plans if p.name == wanted)
    console.document("memory", report.document() | {"chosen": chosen.document() if chosen is not None else None})
    return ExitCode.OK if fit is None and plan is None else _choose(console, report, chosen, write)


def _measure_mmdet3d(console: Console, config: Config) -> int:
    """The memory of a model whose operations only its own project knows: of real steps, by part."""
    from bevctl.engine.dist import select_device
    from bevctl.engine.precision import resolve_precision
    from bevctl.measure.bench_inputs import make_inputs
    from bevctl.measure.memory_report import measure_alone
    from bevctl.measure.parameters import count_parameters

    device = select_device(config.device)
    if device.type != "cuda":
        raise BevctlError(
            "The memory of a model of mmdet3d is not predicted, and there is no GPU to measure it on.",
            "Run this on a GPU.",
            ExitCode.UNKNOWN,
        )
    counts = count_parameters(config)
    precision = resolve_precision(config.precision.dtype, device).name
    measured = measure_alone(config, precision, make_inputs(config, 2, pin=True).batches, device, console.info)
    peak = {name: getattr(measured, name) for name in ("allocated", "reserved", "device")}
    rows = [*measured.components.items(), *peak.items()]
    title = f"GPU memory at the peak, {precision.upper()}, batch {config.train.batch}, measured"
    console.result(table(["what", "memory"], [(name, format_gib(size)) for name, size in rows], title=title))
    body = {
        "source": "measured",
        "parameters": dataclasses.asdict(counts),
        "components": [{"name": name, "bytes": size} for name, size in measured.components.items()],
        "peak": {f"{name}_bytes": size for name, size in peak.items()},
        "plans": [],
    }
    console.document("memory", body)
    return ExitCode.OK


def _times(console: Console, config: Config, seconds: float | None, source: Path | None) -> StepTimes:
    """What is known of the time of steps."""
    from bevctl.measure.memory_report import own_setting
    from bevctl.measure.step_times import StepTimes, read_times

    if seconds is not None:
        precision = "fp16" if config.precision.dtype == "auto" else config.precision.dtype
        return StepTimes({own_setting(config, precision): seconds})
    if source is None:
        return StepTimes({})
    if source.is_file() and source.suffix == ".json":
        return read_times(source)
    return _times_of_run(console, source)


def _times_of_run(console: Console, path: Path) -> StepTimes:
    """The median iteration of a run of any project, with the setting that its log tells."""
    from bevctl.diagnose.setting import setting_of
    from bevctl.measure.step_times import StepSetting, StepTimes
    from bevctl.runs.source import open_source

    log = open_source(path).read()
    setting = setting_of(log, None)
    metric = log.metrics.get("iter_time_s")
    median = metric.p50 if metric is not None else None
    if median is None or setting.precision is None or setting.batch is None:
        told = "no iteration times" if median is None else "not with which precision and batch it trains"
        raise BevctlError(f"{path} tells {told}.", "Give --step-time with the seconds of a step as CONFIG is.")
    # An iteration of other projects is one batch, ours an optimizer step.
    seconds = median / (setting.accumulate if log.format == "bevctl" else 1)
    console.info(f"{path}: {seconds:.3g} s a batch of {setting.batch} in {setting.precision.upper()}")
    return StepTimes({StepSetting(setting.precision, setting.batch, bool(setting.checkpointing)): seconds})


def _describe(report: MemoryReport) -> str:
    sizes = report.sizes
    where = "made in memory" if sizes.source == "synthetic" else f"from {sizes.source}"
    voxels = f", {sizes.typical.sites[0]:,} voxels" if sizes.typical.sites else ""
    points = f", typically {sizes.typical.points:,} points{voxels}" if sizes.typical.points else ""
    epoch = "" if sizes.epoch is not None else f"; an epoch of {report.job.samples:,}, as nuScenes has, is assumed"
    return f"{sizes.samples} {where}{points}{epoch}"


def _choose(console: Console, report: MemoryReport, chosen: Plan | None, write: Path | None) -> int:
    """Says what the chosen plan takes, and writes it."""
    from bevctl.measure.memory_plans import fits_on
    from bevctl.measure.memory_text import verdict

    if chosen is None:
        assert report.card is not None
        least = min(report.plans, key=lambda plan: plan.large)
        console.warn(
            f"No plan fits into {format_gib(report.card)} with a tenth to spare: {least.name} takes the least, "
            f"{format_gib(least.large)}. Use a smaller model or image."
        )
        return ExitCode.FINDINGS
    console.result(verdict(report, chosen))
    if write is not None:
        from bevctl.files import atomic_write_text

        atomic_write_text(write, _yaml(chosen))
        console.info(f"Written: {write}, for `bevctl train --set {shlex.quote(str(write))}`")
    return ExitCode.OK if report.card is None or fits_on(chosen, report.card) else ExitCode.FINDINGS


def _yaml(plan: Plan) -> str:
    import yaml

    return f"# {plan.name}, written by `bevctl memory`\n" + yaml.safe_dump(plan.settings(), sort_keys=False)
