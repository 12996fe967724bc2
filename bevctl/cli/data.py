"""`bevctl data`: make, prepare, check, show and measure data sets in nuScenes format."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.data_sample import bench, show
from bevctl.cli.options import CommandGroup, json_option
from bevctl.console import Console, Progress
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from bevctl.data.check import CheckedInfo
    from bevctl.data.gt_database import WrittenDatabase
    from bevctl.data.prepare import PreparedFile

SYNTH_PREFIX = "synth"


@click.group("data", cls=CommandGroup)
def command() -> None:
    """Make, prepare, check, show and measure data sets in nuScenes format."""


@command.command("synth")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--seed", type=int, metavar="N", help="Seed of everything random; default: 0.")
@click.option(
    "--version", metavar="V", help="Name of the tables: v1.0-mini (default) or v1.0-trainval, which allows more scenes."
)
@click.option("--train-scenes", type=int, metavar="N", help="Scenes to train on; default: 8.")
@click.option("--val-scenes", type=int, metavar="N", help="Held-out scenes, on another map; default: 2.")
@click.option("--keyframes", type=int, metavar="N", help="Annotated samples a scene, half a second apart; default: 8.")
@click.option(
    "--camera-sweeps", is_flag=True, help="Also take images between the keyframes, at 10 Hz: five times as long."
)
@click.option("--image-scale", type=float, metavar="SCALE", help="Image size over 1600x900; default: 0.5.")
@click.option(
    "--lidar-beams", type=int, metavar="N", help="Beams of the LiDAR; fewer see less of what is far away; default: 32."
)
@click.option("--processes", type=int, metavar="N", help="Worker processes; default: one a core.")
@json_option
@click.pass_obj
def synth(console: Console, directory: Path, **options: Any) -> None:
    """Make a complete synthetic data set in DIR, with info files, that nuscenes-devkit opens.

    With no option: the set of `bevctl quickstart`, in less than a minute.
    """
    from bevctl.data.prepare import prepare
    from bevctl.data.synth.dataset import make_dataset
    from bevctl.data.synth.options import SynthOptions

    chosen = SynthOptions(**{name: value for name, value in options.items() if value is not None})
    with _Phases(console) as phases:
        summary = make_dataset(directory, chosen, phases)
        written = prepare(directory, chosen.version, prefix=SYNTH_PREFIX, progress=phases)
    console.result(
        f"{directory}: {summary.samples} samples in {len(summary.train_scenes)} training and "
        f"{len(summary.val_scenes)} held-out scenes, {summary.annotations} boxes, "
        f"{summary.bytes / 1e6:.0f} MB in {summary.seconds:.0f} s."
    )
    console.result(_describe_written(written))
    body = {
        "root": directory,
        "tables": summary.version,
        "samples": summary.samples,
        "annotations": summary.annotations,
        "images": summary.images,
        "sweeps": summary.sweeps,
        "bytes": summary.bytes,
        "seconds": summary.seconds,
    }
    console.document("data", {"action": "synth", **body, "files": _written_body(written)})


@command.command("prepare")
@click.option(
    "--root",
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that holds samples/, sweeps/ and the tables.",
)
@click.option("--version", metavar="V", help="Tables to read: v1.0-mini, v1.0-trainval or v1.0-test.")
@click.option(
    "--prefix", default="nuscenes", show_default=True, metavar="NAME", help="Start of the names of what is written."
)
@click.option(
    "--max-sweeps",
    type=click.IntRange(min=0),
    metavar="N",
    default=10,
    show_default=True,
    help="Earlier LiDAR sweeps stored for each sample.",
)
@click.option(
    "--camera-sweeps",
    type=click.IntRange(min=0),
    metavar="N",
    default=30,
    show_default=True,
    help="Earlier images of each camera that a sample can look back on (data.previous).",
)
@click.option(
    "--gt-database",
    is_flag=True,
    help="Also store the training objects with their points, for data.paste: <prefix>_gt_database_train.npz and .bin.",
)
@click.option(
    "--info-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --gt-database: take the objects from this info file of any layout, and write none.",
)
@json_option
@click.pass_obj
def prepare_command(
    console: Console,
    root: Path,
    version: str | None,
    prefix: str,
    max_sweeps: int,
    camera_sweeps: int,
    gt_database: bool,
    info_file: Path | None,
) -> None:
    """Build info files (mmdet3d 1.1 layout) from nuScenes tables, and a database of objects to paste."""
    from bevctl.data.prepare import prepare

    if info_file is not None and not gt_database:
        raise BevctlError("--info-file is for --gt-database alone.", "Add --gt-database, or leave it out.")
    if info_file is None and version is None:
        raise BevctlError("Missing option --version.", "For example --version v1.0-trainval.")
    written: tuple[PreparedFile, ...] = ()
    database = None
    with _Phases(console) as phases:
        if info_file is None and version is not None:
            stored = {"max_sweeps": max_sweeps, "camera_sweeps": camera_sweeps}
            written = prepare(root, version, prefix=prefix, **stored, progress=phases)
        if gt_database:
            database = _write_database(root, info_file or _training_file(written), prefix, phases)
    if written:
        console.result(_describe_written(written))
    if database is not None:
        _tell_database(console, database)
    body = {"action": "prepare", "root": root, "tables": version, "files": _written_body(written)}
    console.document("data", {**body, "gt_database": None if database is None else vars(database)})


def _training_file(written: tuple[PreparedFile, ...]) -> Path:
    for file in written:
        if file.split == "train":
            return file.path
    raise BevctlError("The test split has no annotated objects for --gt-database.", "Use v1.0-trainval or v1.0-mini.")


def _write_database(root: Path, info_file: Path, prefix: str, phases: _Phases) -> WrittenDatabase:
    from bevctl.config.schema import DataConfig
    from bevctl.data.gt_database import write_gt_database
    from bevctl.data.index import read_info

    path = root / f"{prefix}_gt_database_train.npz"
    return write_gt_database(path, read_info(info_file), root, DataConfig().classes, phases)


def _tell_database(console: Console, database: WrittenDatabase) -> None:
    for problem in database.problems:
        console.warn(f"{problem} Its objects are left out.")
    counts = ", ".join(f"{count} {name}" for name, count in database.per_class.items())
    console.result(f"{database.path}: {database.objects} objects with {database.points:,} points ({counts})")


@command.command("check")
@click.argument("info_file", required=False, metavar="[INFO_FILE]", type=click.Path(path_type=Path))
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Data set folder; without INFO_FILE all info files in it are checked. Default: the folder of INFO_FILE.",
)
@json_option
@click.pass_obj
def check(console: Console, info_file: Path | None, root: Path | None) -> ExitCode:
    """Say format, version and number of samples of each info file, and count the files that are missing or cut short.

    Exits 1 where a file is missing or damaged, or an info file of the folder cannot be read. Earlier images, which only
    data.previous reads, are counted apart and decide nothing.
    """
    from bevctl.data.check import check_info, find_info_files

    if info_file is not None and info_file.is_dir():
        info_file, root = None, root or info_file
    if info_file is None and root is None:
        raise BevctlError("Nothing to check.", "Give an info file, or a data set folder.")
    checked: list[CheckedInfo] = []
    broken: list[tuple[Path, BevctlError]] = []
    paths = [info_file] if info_file is not None else find_info_files(Path(root or "."))
    with _Phases(console) as phases:
        for path in paths:
            try:
                checked.append(check_info(path, root or path.parent, phases))
            except BevctlError as error:
                if info_file is not None:
                    raise
                broken.append((path, error))
    _tell_checked(console, checked, broken)
    sound = not broken and all(info.complete for info in checked)
    console.document("data", _checked_body(checked, broken), status="ok" if sound else "fail")
    return ExitCode.OK if sound else ExitCode.FINDINGS


command.add_command(show)
command.add_command(bench)


def _tell_checked(console: Console, checked: list[CheckedInfo], broken: list[tuple[Path, BevctlError]]) -> None:
    for info in checked:
        console.result(_describe_checked(info))
    for info in checked:
        for note in info.notes:
            console.info(f"{info.path.name}: {note}")
        if info.camera_sweeps:
            console.info(f"{info.path.name}: {info.camera_sweeps:,} earlier images for data.previous.")
        if info.missing:
            counts = _by_sensor(info.missing)
            console.warn(f"{info.path.name}: files are missing: {counts}; the first is {info.first_missing}.")
        if info.damaged:
            counts = _by_sensor(info.damaged)
            console.warn(f"{info.path.name}: files are damaged: {counts}; the first is {info.first_damaged}.")
        if info.camera_sweeps_missing:
            counts = _by_sensor(info.camera_sweeps_missing)
            console.warn(f"{info.path.name}: earlier images are missing, which data.previous reads: {counts}.")
    for path, error in broken:
        console.warn(f"{path.name}: {error.message}")


def _describe_checked(info: CheckedInfo) -> str:
    """Two lines, which fit a narrow screen."""
    found = f"{info.samples:,} samples, {info.boxes:,} boxes, {info.sweeps:,} sweeps, {info.files:,} files"
    missing, damaged = sum(info.missing.values()), sum(info.damaged.values())
    state = f"{missing:,} missing, {damaged:,} damaged" if missing or damaged else "all there"
    return f"{info.path.name}: {info.format}, {info.version}, boxes as {info.box_convention}\n  {found}: {state}"


def _by_sensor(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} of {sensor}" for sensor, count in counts.items())


def _checked_body(checked: list[CheckedInfo], broken: list[tuple[Path, BevctlError]]) -> dict[str, Any]:
    files: list[dict[str, Any]] = [
        {
            "path": info.path,
            "format": info.format,
            "version": info.version,
            "box_convention": info.box_convention,
            "samples": info.samples,
            "boxes": info.boxes,
            "sweeps": info.sweeps,
            "per_class": info.per_class,
            "files": info.files,
            "missing": info.missing,
            "first_missing": info.first_missing,
            "damaged": info.damaged,
            "first_damaged": info.first_damaged,
            "camera_sweeps": info.camera_sweeps,
            "camera_sweeps_missing": info.camera_sweeps_missing,
            "notes": info.notes,
        }
        for info in checked
    ]
    return {
        "action": "check",
        "files": files,
        "unreadable": [{"path": path, "message": error.message} for path, error in broken],
    }


def _describe_written(written: tuple[PreparedFile, ...]) -> str:
    return "\n".join(f"{file.path}: {file.samples} samples, {file.boxes} boxes" for file in written)


def _written_body(written: tuple[PreparedFile, ...]) -> list[dict[str, Any]]:
    return [{"path": file.path, "split": file.split, "samples": file.samples, "boxes": file.boxes} for file in written]


class _Phases:
    """Shows (done, total, what) reports as progress; a count that starts again begins a new bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stack = ExitStack()
        self._bar: Progress | None = None
        self._total = 0
        self._done = 0

    def __enter__(self) -> _Phases:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is None or total != self._total or done <= self._done:
            self._stack.close()
            self._bar = self._stack.enter_context(self._console.progress(total, what))
            self._total, self._done = total, 0
        self._bar.describe(what)
        self._bar.advance(done - self._done)
        self._done = done
