"""Writing a set: determinism, what is refused, what an interruption leaves."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from bevctl.data.synth import SynthOptions, dataset, make_dataset
from bevctl.errors import BevctlError, ExitCode

NANO = SynthOptions(
    train_scenes=1, val_scenes=1, keyframes=2, image_scale=0.05, azimuth_steps=36, sweeps=False, processes=1
)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digest of the nano set, made in one process in a new folder."""
    root = tmp_path_factory.mktemp("fresh")
    make_dataset(root, NANO)
    return digest(root)


def digest(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_the_same_seed_gives_the_same_bytes_with_any_number_of_processes(fresh: dict[str, str], tmp_path: Path) -> None:
    make_dataset(tmp_path, dataclasses.replace(NANO, processes=2))
    assert digest(tmp_path) == fresh


def test_another_seed_gives_other_scenes(fresh: dict[str, str], tmp_path: Path) -> None:
    make_dataset(tmp_path, dataclasses.replace(NANO, seed=1))
    other = digest(tmp_path)
    expansion = "maps/expansion/boston-seaport.json"
    assert fresh[expansion] != other[expansion]
    assert not {v for k, v in fresh.items() if k.startswith("samples")} & set(other.values())


def test_an_earlier_set_and_its_info_files_are_replaced_and_other_files_stay(
    fresh: dict[str, str], tmp_path: Path
) -> None:
    make_dataset(tmp_path, dataclasses.replace(NANO, val_scenes=0, keyframes=3, camera_sweeps=True))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "synth_infos_train.pkl").write_bytes(b"of the earlier set")
    make_dataset(tmp_path, NANO)
    kept = digest(tmp_path)
    assert kept.pop("notes.txt")
    assert kept == fresh


def test_a_folder_with_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "v1.0-mini").mkdir()
    (tmp_path / "v1.0-mini" / "scene.json").write_text("[]")
    with pytest.raises(BevctlError, match="not empty") as caught:
        make_dataset(tmp_path, NANO)
    assert caught.value.code == ExitCode.USAGE
    assert (tmp_path / "v1.0-mini" / "scene.json").read_text() == "[]"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(BevctlError, match="not a folder"):
        make_dataset(tmp_path / "data", NANO)


def test_an_interrupted_set_has_no_tables_and_may_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, str]] = []
    make_dataset(tmp_path, NANO, lambda *call: calls.append(call))
    assert calls == [(1, 2, "scene-0061"), (2, 2, "scene-0103")]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "draw_mask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path, NANO)
    assert not (tmp_path / "v1.0-mini").exists()
    assert (tmp_path / dataset.MARKER).is_file()


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dataset, "capture_scene", full)
    with pytest.raises(BevctlError, match="No space left on device") as caught:
        make_dataset(tmp_path, NANO)
    assert caught.value.code == ExitCode.RUN_FAILED
    assert not (tmp_path / "v1.0-mini").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keyframes": 1}, "keyframes is 1"),
        ({"image_scale": 0.0}, "image_scale is 0.0"),
        ({"azimuth_steps": 8}, "azimuth_steps is 8"),
        ({"lidar_beams": 1}, "lidar_beams is 1"),
        ({"train_scenes": 9}, "names only 8"),
        ({"val_scenes": 3}, "names only 2"),
        ({"version": "v1.0"}, "unknown version 'v1.0'"),
        ({"processes": 0}, "processes is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_options_out_of_range_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BevctlError, match=message) as caught:
        dataclasses.replace(SynthOptions(), **change)
    assert caught.value.hint


def test_larger_sets_use_the_names_of_the_full_split() -> None:
    from nuscenes.utils.splits import train, val

    names = SynthOptions(version="v1.0-trainval", train_scenes=20, val_scenes=5).scene_names()
    assert names == (tuple(train[:20]), tuple(val[:5]))


def test_scenes_of_one_location_have_tiles_of_their_own() -> None:
    plans = dataset.plan_scenes(SynthOptions())
    assert len({(plan.location, plan.tile) for plan in plans}) == len(plans) == 10
    held_out = {plan.location for plan in plans[8:]}
    assert not held_out & {plan.location for plan in plans[:8]}
