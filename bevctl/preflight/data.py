"""Checks of section "data": info files, the files that they name, maps, calibration, and the length of an epoch."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bevctl.config.document import display
from bevctl.engine.class_order import classes_of, other_order
from bevctl.errors import BevctlError
from bevctl.preflight.checks import CheckSpec, Context, Outcome, failed, passed, skipped, warned
from bevctl.preflight.data_infos import LOW_SHARE, SAMPLES, SURE_SHARE, readable_infos, spread, train_info, val_info
from bevctl.preflight.data_paste import object_database
from bevctl.preflight.data_previous import earlier_images
from bevctl.preflight.files_checkpoint import NothingToResume, resumed_report
from bevctl.preflight.plan import Plan, of_plan

if TYPE_CHECKING:
    from bevctl.data.info import InfoFile

MAP_LOCATIONS = ("boston-seaport", "singapore-hollandvillage", "singapore-onenorth", "singapore-queenstown")
_MAKE = "Make them with `bevctl data prepare`, or set data.root, data.info_train and data.info_val."


@of_plan
def info_files_present(context: Context, plan: Plan) -> Outcome:
    """DATA001: the info files that the config names are there and are not empty."""
    if context.foreign is not None and context.foreign.kind == "openpcdet":
        return skipped("info files of OpenPCDet have a layout of their own")
    if not plan.info_files:
        return failed("the config names no info file that could be worked out", "Name ann_file as plain text.")
    missing = [f"{split}: {_absence(path)}" for split, path in plan.info_files.items() if _absence(path)]
    if missing:
        fix = _MAKE if context.foreign is None else "Make them with the project's tools, or set ann_file."
        return failed("; ".join(missing), fix)
    return passed(", ".join(f"{display(p)} ({p.stat().st_size / 1e6:,.1f} MB)" for p in plan.info_files.values()))


def _absence(path: Path) -> str:
    """What is wrong with a path; empty for a readable file."""
    try:
        if path.is_dir():
            return f"{display(path)} is a folder"
        with path.open("rb") as file:
            return "" if file.read(1) else f"{display(path)} is empty"
    except OSError as error:
        return f"{display(path)}: {error.strerror or error}"


@of_plan
def info_files_read(context: Context, plan: Plan) -> Outcome:
    """DATA002: info files can be read, are of a layout that the program knows, and of one version of nuScenes."""
    told, versions = [], set()
    there = {split for split, path in plan.info_files.items() if not _absence(path)}
    if not there:
        return skipped("the info files are not there, see DATA001")
    for split, read in (("train", train_info), ("val", val_info)):
        if split not in there:
            continue
        try:
            info = context.once(read)
        except BevctlError as error:
            return failed(error.message, error.hint)
        if not info.samples:
            return failed(f"{display(info.path)} has no samples", _MAKE)
        told.append(f"{split}: {len(info.samples):,} samples, {info.format}, {info.version}")
        versions.add(info.version)
        if not _layout_fits(context, info.format):
            fix = (
                "Convert it with the tools of that version of mmdet3d (tools/create_data.py or update_infos_to_v2.py)."
            )
            return failed(f"{told[-1]}, which this program does not read", fix)
    said = "; ".join(told)
    if len(versions) > 1:
        return warned(f"{said}: of different versions", "Use info files of one version for training and evaluation.")
    return passed(said)


def _layout_fits(context: Context, format: str) -> bool:
    """mmdet3d 1.1 and newer read `data_list` files only, older ones and mit-bevfusion `infos` files only."""
    if context.foreign is None:
        return True
    return format.startswith("mmdet3d-1.1") == (context.foreign.kind == "mmengine")


@of_plan
def class_names(context: Context, plan: Plan) -> Outcome:
    """DATA003: the config's classes are those of the data, and in the order of the checkpoint that is resumed."""
    info = readable_infos(context).get("train")
    if info is None:
        return skipped("the training info file cannot be read, see DATA002")
    if not plan.classes:
        return skipped("the config's classes could not be worked out")
    counts = Counter(name for sample in info.samples for name in sample.names)
    absent = [name for name in plan.classes if not counts[name]]
    if len(absent) == len(plan.classes):
        fix = f"The data has {', '.join(list(counts)[:12]) or 'no boxes at all'}: use these names in data.classes."
        return failed(f"none of the classes {', '.join(plan.classes)} occurs in the training data", fix)
    order = _other_order(context, plan.classes)
    if order is not None:
        fix = "Use the order of the checkpoint: the outputs of the network are numbered by it."
        return failed(f"the checkpoint was trained with the classes {', '.join(order)}", fix)
    if absent:
        return warned(f"no box of {', '.join(absent)}", "Check the spelling, or expect an AP of 0 for them.")
    return passed(", ".join(f"{name} {counts[name]:,}" for name in plan.classes))


def _other_order(context: Context, classes: Sequence[str]) -> tuple[str, ...] | None:
    """The resumed checkpoint's classes, where they are these in another order."""
    try:
        checkpoint = context.once(resumed_report).checkpoint
    except NothingToResume:
        return None
    theirs = classes_of(checkpoint.meta) if checkpoint is not None else ()
    return theirs if other_order(theirs, tuple(classes)) else None


@of_plan
def files_open(context: Context, plan: Plan) -> Outcome:
    """DATA004: images of a few samples decode, point files have the right width, sweeps are there."""
    from bevctl.preflight.data_samples import open_files

    infos = readable_infos(context)
    if not infos:
        return skipped("no info file can be read, see DATA002")
    width = _point_width(context)
    opened, problems = 0, []
    for info in infos.values():
        for sample in spread(info.samples, SAMPLES):
            count, found = open_files(plan.data_root, sample, plan.uses_cameras, plan.uses_points, width)
            opened += count
            problems.extend(found)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        fix = "`bevctl data check` counts the files that are missing or cut short, by sensor."
        return failed(f"{'; '.join(problems[:3])}{more}", fix)
    return passed(f"{opened} files of {SAMPLES} samples a split opened")


def _point_width(context: Context) -> int:
    """Values a point in the files: `load_dim` of another project's loader, 5 in nuScenes."""
    found = context.foreign.find("load_dim", "train_pipeline") if context.foreign is not None else iter(())
    return next((value for value in found if isinstance(value, int) and 3 <= value <= 16), 5)


@of_plan
def map_expansion(context: Context, plan: Plan) -> Outcome:
    """DATA005: the map expansion is there when a map is trained."""
    if not plan.needs_map:
        return skipped("no map head")
    infos = readable_infos(context)
    named = {sample.location for info in infos.values() for sample in info.samples if sample.location}
    folder = plan.data_root / "maps" / "expansion"
    missing = [name for name in sorted(named or MAP_LOCATIONS) if not _whole_json(folder / f"{name}.json")]
    if missing:
        fix = "Download the nuScenes map expansion (1.3 or newer) and unpack it into maps/ of the data root."
        return failed(f"missing or cut off in {display(folder)}: {', '.join(missing)}", fix)
    if infos and not named:
        fix = "Make the info files anew with `bevctl data prepare`: they need the location of each sample."
        return failed("the info files do not say on which map a sample lies", fix)
    return passed(f"{', '.join(sorted(named or MAP_LOCATIONS))} in {display(folder)}")


def _whole_json(path: Path) -> bool:
    """Whether a file begins and ends as a JSON object does; the maps are too large to parse here."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
            file.seek(max(os.path.getsize(path) - 64, 0))
            return start == b"{" and file.read().rstrip()[-1:] == b"}"
    except OSError:
        return False


@of_plan
def calibration(context: Context, plan: Plan) -> Outcome:
    """DATA006: matrices are rotations, and projected ground-truth boxes land in images."""
    from bevctl.preflight.data_samples import bad_matrices, boxes_in_images

    info = readable_infos(context).get("train")
    if info is None:
        return skipped("the training info file cannot be read, see DATA002")
    samples = spread(info.samples, 4 * SAMPLES)
    problems = [problem for sample in samples for problem in bad_matrices(sample)]
    fix = "Rebuild the info file with `bevctl data prepare`; check that its transforms are not inverted."
    if problems:
        return failed("; ".join(problems[:3]), fix)
    seen, total = boxes_in_images(plan.data_root, samples)
    if total == 0:
        return skipped("no boxes with LiDAR points in these samples, or no camera")
    said = f"{seen} of {total} boxes land in an image ({seen / total:.0%})"
    if seen / total < LOW_SHARE:
        return failed(said, fix)
    return passed(said) if seen / total >= SURE_SHARE else warned(said, fix)


@of_plan
def epoch_length(context: Context, plan: Plan) -> Outcome:
    """DATA007: how many iterations an epoch has."""
    info = readable_infos(context).get("train")
    if info is None:
        return skipped("the training info file cannot be read, see DATA002")
    try:
        samples = _training_length(context, info)
    except BevctlError as error:
        return failed(error.message, error.hint)
    length = samples // (plan.batch * plan.gpus) // plan.accumulate
    said = f"{samples:,} samples / ({' x '.join(_factors(plan))}) = {length:,} iterations an epoch"
    if length == 0:
        return failed(said, "Lower --batch, --gpus or --accumulate: an epoch has no complete step.")
    if plan.epochs:
        said += f", {length * plan.epochs:,} in {plan.epochs} epochs"
    if _resamples(context):
        said += "; CBGS draws rare classes more often, which makes nuScenes' training set about 4.4 times as long"
    config = context.config
    total = length * plan.epochs if plan.epochs else math.inf
    if config is not None and config.train.schedule_iters is None and config.optim.warmup >= total:
        return warned(f"{said}; the warm-up alone takes {config.optim.warmup:,}", "Lower --warmup or add epochs.")
    return passed(said)


def _training_length(context: Context, info: InfoFile) -> int:
    """Samples of an epoch, each as often as data.cbgs draws it. Raises BevctlError where nothing can be drawn."""
    from bevctl.data.balance import balanced_positions

    config = context.config
    if config is None or not config.data.cbgs:
        return len(info.samples)
    return len(balanced_positions(info.samples, config.data.classes, config.seed))


def _factors(plan: Plan) -> Iterator[str]:
    yield f"batch {plan.batch}"
    yield f"{plan.gpus} GPU{'s' if plan.gpus > 1 else ''}"
    if plan.accumulate > 1:
        yield f"{plan.accumulate} accumulated"


def _resamples(context: Context) -> bool:
    if context.foreign is None:
        return False
    sections = ("data.train", "train_dataloader")
    kinds = (kind for section in sections for kind in context.foreign.find("type", section))
    return any(str(kind).endswith("CBGSDataset") for kind in kinds)


@of_plan
def evaluation_tables(context: Context, plan: Plan) -> Outcome:
    """DATA008: what another project's evaluation reads is there: nuScenes' tables and map images."""
    if context.foreign is None:
        return skipped("bevctl eval works from the info file alone")
    info = readable_infos(context).get("val")
    if info is None:
        return skipped("the evaluation info file cannot be read, see DATA002")
    tables = plan.data_root / info.version
    missing = [display(tables)] if not (tables / "category.json").is_file() else []
    if not list((plan.data_root / "maps").glob("*.png")):
        missing.append(f"{display(plan.data_root / 'maps')}/*.png")
    if missing:
        return warned(f"missing: {', '.join(missing)}", "Unpack the metadata archive of nuScenes into the data root.")
    return passed(f"{display(tables)} and the map images")


CHECKS: tuple[CheckSpec, ...] = (
    CheckSpec(
        "DATA001",
        "info files present",
        info_files_present,
        why="without them the run does not start, or the first evaluation fails after a whole epoch",
    ),
    CheckSpec(
        "DATA002",
        "info files read",
        info_files_read,
        required="a layout that the program reads, one nuScenes version",
        why="a file of another mmdet3d generation ends the start with a KeyError",
        at_start=False,
    ),
    CheckSpec(
        "DATA003",
        "class names",
        class_names,
        required="the classes of the data, in the order of the checkpoint",
        why="classes under another name are never trained, classes in another order are all confused",
        at_start=False,
    ),
    CheckSpec(
        "DATA004",
        "named files open",
        files_open,
        required="images that decode, points of the right width, sweeps",
        why="a missing archive or a copy that broke off shows hours later, at the first sample of it",
        at_start=False,
    ),
    CheckSpec(
        "DATA005",
        "map expansion",
        map_expansion,
        required="a JSON file for each location",
        why="the map head has no ground truth without it, and the loader fails at its first sample",
        at_start=False,
    ),
    CheckSpec(
        "DATA006",
        "calibration",
        calibration,
        required=f"{SURE_SHARE:.0%} of the boxes in an image",
        why="with wrong calibration training runs through, and the camera branch learns nothing",
        at_start=False,
    ),
    CheckSpec(
        "DATA007",
        "iterations an epoch",
        epoch_length,
        required="at least one",
        why="schedule, warm-up and finish time follow from it",
        at_start=False,
    ),
    CheckSpec(
        "DATA008",
        "evaluation data",
        evaluation_tables,
        required="the tables of the version and the map images",
        why="the devkit's loader fails without them, after the first epoch",
        at_start=False,
    ),
    CheckSpec(
        "DATA009",
        "objects to paste",
        object_database,
        required="the database that data.paste names, with objects of each class",
        why="a class without any is not pasted, and without the file training does not start",
        at_start=False,
    ),
    CheckSpec(
        "DATA010",
        "images of an earlier moment",
        earlier_images,
        required="files, poses and times that data.previous can use",
        why="without them a sample sees its own images twice, and velocities are guessed",
        at_start=False,
    ),
)
