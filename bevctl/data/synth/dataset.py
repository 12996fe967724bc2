"""Writes a whole data set: scenes in parallel, then the maps, and the tables last."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from bevctl import __version__
from bevctl.data.synth.capture import LIDAR, Captured, capture_scene
from bevctl.data.synth.maps import MASK_TOKENS, MapExpansion, draw_mask
from bevctl.data.synth.options import TRAIN_LOCATIONS, VAL_LOCATION, VERSIONS, SynthOptions, SynthSummary
from bevctl.data.synth.rig import CAMERAS
from bevctl.data.synth.scene import TILES_PER_ROW, ScenePlan, tile_size
from bevctl.data.synth.tables import Record, Tables, merge, shared_tables
from bevctl.errors import BevctlError, ExitCode
from bevctl.files import atomic_write_text

Progress = Callable[[int, int, str], None]
"""Called with the number of finished scenes, the number of scenes, and the last one's name."""

MARKER = "synth.json"
"""Written first: says that this folder's content was generated and may be replaced."""


def make_dataset(root: Path, options: SynthOptions, progress: Progress | None = None) -> SynthSummary:
    """Write a synthetic data set in nuScenes format into `root`.

    `root` must be missing, empty or hold an earlier synthetic set, which is replaced. The tables are put in place
    last and at once: a folder `root/<version>` means a complete set.

    Raises BevctlError where `root` holds anything else or can't be written, or when a worker process dies.
    """
    started = time.monotonic()
    _check_target(root)
    try:
        _prepare_target(root, options)
        captured = _capture_all(root, options, progress)
        return _finish(root, options, captured, started)
    except BrokenProcessPool as error:
        raise BevctlError(
            f"a worker process ended while it wrote {root}",
            "Memory may have run out: try fewer processes.",
            ExitCode.RUN_FAILED,
        ) from error
    except OSError as error:
        raise BevctlError(
            f"cannot write the data set to {root}: {error.strerror or error}",
            "Check permissions and free space, then run it again: an unfinished set is replaced.",
            ExitCode.RUN_FAILED,
        ) from error


def plan_scenes(options: SynthOptions) -> list[ScenePlan]:
    """Name, location and place on the map of every scene; held-out scenes have a location of their own."""
    train, val = options.scene_names()
    places = [TRAIN_LOCATIONS[i % len(TRAIN_LOCATIONS)] for i in range(len(train))] + [VAL_LOCATION] * len(val)
    return [
        ScenePlan(name, number, location, places[:number].count(location))
        for number, (name, location) in enumerate(zip([*train, *val], places, strict=True))
    ]


def _check_target(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise BevctlError(f"{root} is not a folder", "Name a folder to create.")
    if root.is_dir() and any(root.iterdir()) and not (root / MARKER).is_file():
        raise BevctlError(
            f"{root} is not empty and holds no synthetic data set", "Name a new folder, or empty this one first."
        )


def _prepare_target(root: Path, options: SynthOptions) -> None:
    """Remove an earlier set, tables and info files first, and make the folders."""
    root.mkdir(parents=True, exist_ok=True)
    marker = root / MARKER
    if marker.is_file():
        for version in VERSIONS:
            shutil.rmtree(root / version, ignore_errors=True)
        for info in root.glob("*_infos_*.pkl"):
            info.unlink()
        for name in ("samples", "sweeps", "maps"):
            shutil.rmtree(root / name, ignore_errors=True)
    atomic_write_text(marker, json.dumps({"bevctl": __version__, "version": options.version, "seed": options.seed}))
    for folder in ("samples", "sweeps"):
        for channel in (*(camera.channel for camera in CAMERAS), LIDAR):
            (root / folder / channel).mkdir(parents=True, exist_ok=True)


def _capture_all(root: Path, options: SynthOptions, progress: Progress | None) -> list[Captured]:
    """Every scene's records, in the order of the plan, whichever process was first."""
    plans = plan_scenes(options)
    captured: dict[int, Captured] = {}
    for number, result in _captures(root, plans, options):
        captured[number] = result
        if progress is not None:
            progress(len(captured), len(plans), plans[number].name)
    return [captured[number] for number in range(len(plans))]


def _captures(root: Path, plans: list[ScenePlan], options: SynthOptions) -> Iterator[tuple[int, Captured]]:
    workers = min(options.processes or len(plans), _cores(), len(plans))
    if workers == 1:
        for plan in plans:
            yield plan.number, capture_scene(root, plan, options)
        return
    # Spawned, not forked: the caller may have threads or a CUDA context.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_follow_parent) as pool:
        futures = {pool.submit(capture_scene, root, plan, options): plan.number for plan in plans}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _follow_parent() -> None:
    """Leave Ctrl-C, which reaches the whole process group, to the parent; end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _finish(root: Path, options: SynthOptions, captured: list[Captured], started: float) -> SynthSummary:
    """Maps, then tables; then the summary."""
    maps = _write_maps(root, options, captured)
    tables = merge([shared_tables(), {"map": maps}, *(scene.tables for scene in captured)])
    _write_tables(root / options.version, tables)
    train, val = options.scene_names()
    files = tables["sample_data"]
    written = sum(scene.bytes for scene in captured)
    others = [path for folder in ("maps", options.version) for path in (root / folder).rglob("*") if path.is_file()]
    return SynthSummary(
        root=root,
        version=options.version,
        train_scenes=train,
        val_scenes=val,
        samples=len(tables["sample"]),
        annotations=len(tables["sample_annotation"]),
        images=sum(record["fileformat"] == "jpg" for record in files),
        sweeps=sum(record["fileformat"] == "pcd" for record in files),
        bytes=written + sum(path.stat().st_size for path in others),
        seconds=time.monotonic() - started,
    )


def _write_maps(root: Path, options: SynthOptions, captured: list[Captured]) -> list[Record]:
    """Vector map and mask of every location; the records of the map table."""
    (root / "maps" / "expansion").mkdir(parents=True, exist_ok=True)
    plans = plan_scenes(options)
    records: list[Record] = []
    for location in sorted({plan.location for plan in plans}):
        here = [(plan, scene) for plan, scene in zip(plans, captured, strict=True) if plan.location == location]
        layouts = [scene.layout for _, scene in here]
        side = tile_size(options.keyframes)
        edge = side * min(len(here), TILES_PER_ROW), side * -(-len(here) // TILES_PER_ROW)
        expansion = MapExpansion(location, edge)
        for layout in layouts:
            expansion.add(layout)
        document = json.dumps(expansion.document(), separators=(",", ":"))
        (root / "maps" / "expansion" / f"{location}.json").write_text(document)
        token = MASK_TOKENS[location]
        draw_mask(layouts, edge).save(root / "maps" / f"{token}.png")
        logs = [scene.tables["log"][0]["token"] for _, scene in here]
        records.append(
            {"token": token, "log_tokens": logs, "category": "semantic_prior", "filename": f"maps/{token}.png"}
        )
    return records


def _write_tables(folder: Path, tables: Tables) -> None:
    """All tables at once: the folder appears when every one is complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, records in tables.items():
        atomic_write_text(partial / f"{name}.json", json.dumps(records, indent=0))
    partial.rename(folder)
