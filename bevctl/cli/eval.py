"""`bevctl eval`: the metrics of a checkpoint, a submission file, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bevctl.cli.options import ConfigRequest, config_option, config_options, engine_option, json_option, precision_flags
from bevctl.cli.ranks import RankedCommand, run_ranks
from bevctl.cli.values import OUTPUT_FILE, OUTPUT_FOLDER
from bevctl.console import Console, table
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bevctl.config.schema import Config
    from bevctl.engine.dist import World
    from bevctl.evaluate.detection import DetectionResult
    from bevctl.evaluate.job import Evaluated
    from bevctl.evaluate.map_iou import MapResult

ERRORS = ("ATE", "ASE", "AOE", "AVE", "AAE")


@click.command("eval", cls=RankedCommand)
@config_options
@engine_option("bevctl", "mmdet3d")
@click.option("--checkpoint", required=True, metavar="CKPT", help="Weights: a path, or a name in the work_dir.")
@precision_flags
@config_option("--batch", key="train.batch", type=int, metavar="N", help="Samples per GPU and step.")
@config_option("--workers", key="train.workers", type=int, metavar="N", help="Loading processes per GPU.")
@click.option("--gpus", type=click.IntRange(1), default=1, metavar="N", help="GPUs of this machine to use; default: 1.")
@click.option(
    "--min-loaded",
    type=click.FloatRange(0, 1),
    default=1.0,
    metavar="SHARE",
    help="Least share of the model's entries that the checkpoint must have; default: 1, all.",
)
@click.option(
    "--submission",
    type=OUTPUT_FILE,
    metavar="FILE",
    help="Write the predictions as nuScenes result JSON; all that a test split without ground truth allows.",
)
@click.option("--show", type=OUTPUT_FOLDER, metavar="DIR", help="Write pictures of samples to DIR.")
@click.option("--show-samples", type=click.IntRange(1), default=8, metavar="N", help="Pictures to write; default: 8.")
@click.option(
    "--show-score", type=click.FloatRange(0, 1), default=0.2, metavar="S", help="Lowest score drawn; default: 0.2."
)
@json_option
@click.pass_obj
def command(
    console: Console,
    request: ConfigRequest,
    checkpoint: str,
    gpus: int,
    min_loaded: float,
    submission: Path | None,
    show: Path | None,
    show_samples: int,
    show_score: float,
) -> int:
    """Evaluate a checkpoint on the evaluation split of CONFIG: nuScenes mAP and NDS, map IoU.

    Without CONFIG the checkpoint's own is used. Ground truth comes from the nuScenes tables below data.root, or from
    the info file alone where there are none.
    """
    config: Config = request.load(fallback=lambda: request.resumed(checkpoint)).config
    if submission is not None and config.model.mmdet3d is not None:
        raise BevctlError(
            "--submission has to say which sensors a model reads, and of mmdet3d's models bevctl does not know it.",
            "Write it with mmdet3d's tools/test.py, which takes the checkpoint.",
        )
    if submission is not None and config.model.object is None:
        raise BevctlError("--submission needs a detection head, and model.object is null.", "Choose another CONFIG.")

    from bevctl.engine.launch import Cluster
    from bevctl.engine.workdir import find_checkpoint, work_dir_of

    path = find_checkpoint(checkpoint, work_dir_of(config))

    def work(world: World) -> int:
        from bevctl.evaluate.job import evaluate_checkpoint

        done = evaluate_checkpoint(config, path, world, console, show_samples if show else 0, min_loaded)
        if world.is_main:
            _check_scored(done, config, submission)
            _write_files(console, done, config, submission, show, show_score)
            _report(console, done)
            console.document("eval", {**done.evaluation.document(), "checkpoint": path, "config": config.name})
        return ExitCode.OK

    return run_ranks(console, Cluster(gpus), config.device, work)


def _check_scored(done: Evaluated, config: Config, submission: Path | None) -> None:
    if done.evaluation.detection is None and done.evaluation.map is None and submission is None:
        raise BevctlError(
            f"{config.data.info_val} has no ground truth for this model: {'; '.join(done.evaluation.notes)}.",
            "Give an annotated data.info_val, or write the predictions with --submission FILE.",
            ExitCode.UNKNOWN,
        )


def _write_files(
    console: Console, done: Evaluated, config: Config, submission: Path | None, show: Path | None, min_score: float
) -> None:
    if submission is not None:
        from bevctl.evaluate.submission import submission as result_file
        from bevctl.evaluate.submission import write_submission

        results = done.evaluation.results
        objects = {token: result.objects for token, result in results.items() if result.objects is not None}
        write_submission(submission, result_file(objects, done.samples, config.data.classes, config.model))
        console.info(f"Wrote the predictions of {len(objects)} samples to {submission}.")
    if show is not None:
        from bevctl.evaluate.show import write_pictures

        with console.progress(len(done.shown), "drawing") as progress:
            for _ in write_pictures(show, done.evaluation, done.shown, config, min_score):
                progress.advance()
        console.info(f"Wrote pictures to {show}.")


def _report(console: Console, done: Evaluated) -> None:
    evaluation = done.evaluation
    if evaluation.detection is not None:
        console.result(_detection_table(evaluation.detection))
    if evaluation.map is not None:
        console.result(_map_table(evaluation.map))
    numbers = [f"{name} {value:.4f}" for name, value in evaluation.metrics().items()]
    console.result(", ".join([*numbers, f"{evaluation.samples} samples"]))
    for note in evaluation.notes:
        console.info(f"Note: {note}.")


def _detection_table(detection: DetectionResult) -> RenderableType:
    rows = [
        [name, f"{row['ground_truth']}", *(_shown(row[key]) for key in ("AP", *ERRORS))]
        for name, row in detection.per_class.items()
    ]
    means = [_shown(detection.mean_ap), *(_shown(detection.tp_errors[f"m{error}"]) for error in ERRORS)]
    title = "Detection (ATE in m, AOE in rad, AVE in m/s)"
    return table(["class", "boxes", "AP", *ERRORS], [*rows, ["mean", "", *means]], title=title)


def _map_table(result: MapResult) -> RenderableType:
    rows = [[name, _shown(value), _shown(result.thresholds[name])] for name, value in result.per_class.items()]
    return table(["class", "IoU", "threshold"], [*rows, ["mean", _shown(result.miou), ""]], title="Map")


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
