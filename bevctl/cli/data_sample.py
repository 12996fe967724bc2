"""`bevctl data show` and `bench`: samples as the model gets them, and what it costs to make them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bevctl.cli.options import ConfigRequest, config_option, config_options, json_option
from bevctl.cli.overrides import ConfigCommand
from bevctl.cli.values import OUTPUT_FILE
from bevctl.console import Console, table
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bevctl.data.bench import DataBench
    from bevctl.data.nuscenes import NuScenesDataset
    from bevctl.data.sample import Sample

SPLITS = click.Choice(["train", "val"])


@click.command("show", cls=ConfigCommand)
@config_options
@click.option(
    "--split", type=SPLITS, default="train", show_default=True, help="train is augmented, val as in evaluation."
)
@click.option("--index", type=click.IntRange(0), metavar="N", help="Place of the sample in its split; default: 0.")
@click.option("--token", metavar="TOKEN", help="The sample by its token.")
@click.option(
    "--epoch", type=click.IntRange(0), default=0, metavar="N", help="Epoch, from 0, whose augmentation is shown."
)
@click.option("-o", "--output", type=OUTPUT_FILE, metavar="FILE", help="Default: <token>.png.")
@json_option
@click.pass_obj
def show(
    console: Console,
    request: ConfigRequest,
    split: str,
    index: int | None,
    token: str | None,
    epoch: int,
    output: Path | None,
) -> None:
    """Draw one sample of CONFIG's data set as the model gets it, to see that its augmentation is right.

    Six augmented images, twelve with data.previous, with boxes and projected LiDAR points, and the scene from above
    over the map to learn.
    """
    if index is not None and token is not None:
        raise BevctlError("--index and --token both name a sample.", "Give one of them.")
    config = request.load().config

    from bevctl.data.nuscenes import NuScenesDataset
    from bevctl.evaluate.draw_input import draw_input
    from bevctl.files import atomic_path

    dataset = NuScenesDataset(config, split)
    for note in dataset.notes:
        console.info(note)
    place = dataset.position_of(token) if token is not None else _checked(index or 0, dataset)
    sample = _sample(console, dataset, epoch, place)
    when = f"train, epoch {epoch}" if split == "train" else "val"
    said = f"{len(sample.boxes)} boxes" + ("" if sample.points is None else f"  ·  {len(sample.points):,} points")
    picture = draw_input(f"sample {sample.token}  ·  {when}  ·  {said}", sample, dataset.cameras, config)
    path = output or Path(f"{sample.token}.png")
    with atomic_path(path) as temporary:
        picture.save(temporary, format="PNG")
    console.result(f"{path}: sample {sample.token}, {when}, {said.replace('  ·  ', ', ')}")
    body = {"path": path, "token": sample.token, "split": split, "index": place, "epoch": epoch}
    steps = list(dataset.steps(dataset.info_at(place), epoch))
    counts = {"boxes": len(sample.boxes), "points": None if sample.points is None else len(sample.points)}
    console.document("data", {"action": "show", **body, **counts, "steps": steps})


def _checked(index: int, dataset: NuScenesDataset) -> int:
    if index >= len(dataset):
        raise BevctlError(
            f"There is no sample {index}: {dataset.info.path} has {len(dataset)}.",
            f"Give an index from 0 to {len(dataset) - 1}.",
        )
    return index


def _sample(console: Console, dataset: NuScenesDataset, epoch: int, place: int) -> Sample:
    """The sample at a place, or, as in training, the one that stands in for it where it cannot be read."""
    item = dataset[(epoch, place)]
    if item.sample is None:
        raise BevctlError(item.problems[-1], "`bevctl data check` counts what is missing.", ExitCode.RUN_FAILED)
    for problem in item.problems:
        console.warn(f"{problem} Shown is what training takes instead.")
    return item.sample


@click.command("bench", cls=ConfigCommand)
@config_options
@click.option("--split", type=SPLITS, default="train", show_default=True, help="train is augmented, val is not.")
@click.option(
    "--samples", type=click.IntRange(1), default=20, show_default=True, metavar="N", help="Samples to prepare."
)
@config_option("--workers", key="train.workers", type=click.IntRange(0), metavar="N", help="Loading processes a GPU.")
@json_option
@click.pass_obj
def bench(console: Console, request: ConfigRequest, split: str, samples: int) -> None:
    """Measure how many samples of CONFIG's data set one core prepares in a second, by step.

    Processor time counts, so that other work on the machine changes little.
    """
    config = request.load().config

    from bevctl.data.bench import bench_data
    from bevctl.data.nuscenes import NuScenesDataset

    dataset = NuScenesDataset(config, split)
    with console.progress(samples, "preparing samples") as progress:
        measured = bench_data(dataset, samples, lambda _: progress.advance())
    for problem in measured.problems:
        console.warn(problem)
    console.result(_cost_table(measured))
    workers = max(1, config.train.workers)
    rate = workers * measured.total.samples_per_s
    console.result(
        f"train.workers {config.train.workers}: at most {rate:.1f} samples/s a GPU, "
        f"{rate / config.train.batch:.2f} batches of {config.train.batch}, given a core each."
    )
    costs = [
        {"name": cost.name, "cpu_s": cost.cpu_s, "wall_s": cost.wall_s, "samples_per_s": cost.samples_per_s}
        for cost in (*measured.stages, measured.total)
    ]
    body = {"split": split, "samples": measured.samples, "stages": costs[:-1], "total": costs[-1]}
    console.document("data", {"action": "bench", **body, "workers": workers, "problems": measured.problems})


def _cost_table(measured: DataBench) -> RenderableType:
    rows = [
        [
            cost.name,
            f"{1e3 * cost.cpu_s:.1f}",
            f"{1e3 * cost.wall_s:.1f}",
            f"{cost.cpu_s / measured.total.cpu_s:.0%}",
            f"{cost.samples_per_s:,.1f}",
        ]
        for cost in (*measured.stages, measured.total)
    ]
    columns = ["step", "CPU ms", "wall ms", "share", "samples/s a core"]
    return table(columns, rows, title=f"Mean of {measured.samples} samples")
