from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bevctl.batch import MAP_CLASSES
from bevctl.config.schema import SpaceAugmentConfig
from bevctl.data.index import read_info
from bevctl.data.info import SampleInfo
from bevctl.data.maps import LAYERS, MapLayers, load_map, map_masks
from bevctl.data.transforms import draw_space_change
from bevctl.errors import BevctlError
from bevctl.geometry import Array, rigid, rotation_z, transform_points, yaw_of

BOUND = (-50.0, 50.0, 0.5)


@pytest.fixture(scope="module")
def sample(synth_root: Path) -> SampleInfo:
    return read_info(synth_root / "synth_infos_train.pkl").samples[1]


@pytest.fixture(scope="module")
def layers(synth_root: Path, sample: SampleInfo) -> MapLayers:
    assert sample.location is not None
    return load_map(str(synth_root), sample.location)


def _pose(sample: SampleInfo, turn: float = 0.0) -> Array:
    return sample.ego2global @ sample.lidar2ego @ rigid(rotation_z(turn), np.zeros(3))


@pytest.mark.parametrize("turn", [0.0, 0.8, -2.4])
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "divider"])
def test_masks_are_the_devkits(layers: MapLayers, sample: SampleInfo, layer: str, turn: float) -> None:
    pose = _pose(sample, turn)
    ours = map_masks(layers, [layer], pose, np.eye(4), BOUND, BOUND)[0]
    box = (pose[0, 3], pose[1, 3], 100.0, 100.0)
    try:
        theirs = layers._map.get_map_mask(box, np.degrees(yaw_of(pose)), [layer], (200, 200))[0]
    except TypeError:
        pytest.skip("the devkit cannot draw a line that is cut into several with shapely 2")
    # rounding of a corner on a half cell may differ
    assert (ours != theirs.T).mean() < 5e-4


def test_every_class_shows_somewhere(synth_root: Path) -> None:
    seen = np.zeros(len(MAP_CLASSES))
    for info in read_info(synth_root / "synth_infos_train.pkl").samples:
        masks = map_masks(
            load_map(str(synth_root), str(info.location)), MAP_CLASSES, _pose(info), np.eye(4), BOUND, BOUND
        )
        assert masks.shape == (6, 200, 200)
        assert masks.dtype == np.uint8
        seen += masks.mean(axis=(1, 2))
    assert (seen > 0).all()


def test_a_divider_is_a_road_or_a_lane_divider(layers: MapLayers, sample: SampleInfo) -> None:
    names = ("divider", "road_divider", "lane_divider")
    either, road, lane = map_masks(layers, names, _pose(sample), np.eye(4), BOUND, BOUND)
    np.testing.assert_array_equal(either, road | lane)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_masks_follow_the_augmentation(layers: MapLayers, sample: SampleInfo, seed: int) -> None:
    """A cell shows what lies at its place in the world: whether its centre is inside a polygon, asked of shapely."""
    from shapely.geometry import Point

    rng = np.random.default_rng(seed)
    lidar_aug = draw_space_change(SpaceAugmentConfig(), rng)
    pose = _pose(sample)
    (mask,) = map_masks(layers, ["drivable_area"], pose, lidar_aug, BOUND, (-40.0, 40.0, 0.5))
    assert mask.shape == (200, 160)
    cells = np.column_stack([rng.integers(0, 200, 300), rng.integers(0, 160, 300)])
    centres = np.column_stack([cells * 0.5 + 0.25 - [50.0, 40.0], np.zeros(300)])
    level = rigid(rotation_z(yaw_of(pose)), pose[:3, 3])
    world = transform_points(level @ np.linalg.inv(lidar_aug), centres)
    polygons = layers.near("drivable_area", world[:, :2])
    inside = np.array([any(polygon.contains(Point(x, y)) for polygon in polygons) for x, y, _ in world])
    shown = mask[cells[:, 0], cells[:, 1]].astype(bool)
    assert 0 < inside.sum() < 300
    assert (shown == inside).mean() > 0.95


def test_a_map_is_opened_once(synth_root: Path, sample: SampleInfo, layers: MapLayers) -> None:
    assert load_map(str(synth_root), str(sample.location)) is layers


def test_a_broken_map_file_is_named(tmp_path: Path, synth_root: Path) -> None:
    folder = tmp_path / "maps" / "expansion"
    folder.mkdir(parents=True)
    (folder / "boston-seaport.json").write_text("{")
    with pytest.raises(BevctlError, match=r"boston-seaport\.json cannot be opened"):
        MapLayers(tmp_path, "boston-seaport")
    whole = next((synth_root / "maps" / "expansion").glob("*.json"))
    shutil.copy(whole, folder / "nowhere.json")
    with pytest.raises(BevctlError, match="Unknown map name nowhere"):
        MapLayers(tmp_path, "nowhere")


def test_a_road_with_one_bad_corner_is_not_lost() -> None:
    from shapely.geometry import Polygon

    from bevctl.data.maps import _repaired

    bow_tie = Polygon([(0, 0), (2, 2), (2, 0), (0, 2)])
    parts = list(_repaired(bow_tie))
    assert sum(part.area for part in parts) == pytest.approx(2.0)
    assert next(_repaired(Polygon([(0, 0), (1, 0), (1, 1)]))).area == pytest.approx(0.5)


class _FakeLayers(MapLayers):
    """Geometries given directly."""

    def __init__(self, geometries: list[Any]) -> None:
        self.geometries = geometries

    def near(self, layer: str, area: Array) -> list[Any]:
        del layer, area
        return self.geometries


def test_a_line_that_leaves_and_comes_back_is_drawn_twice() -> None:
    from shapely.geometry import LineString

    hairpin = LineString([(-60, -20), (60, -20), (60, 20), (-60, 20)])
    bound = (-50.0, 50.0, 1.0)
    (mask,) = map_masks(_FakeLayers([hairpin]), ["road_divider"], np.eye(4), np.eye(4), bound, bound)
    lines = np.flatnonzero(mask.all(axis=0))
    assert {30, 70} <= set(lines)
    assert len(lines) <= 6


def test_a_hole_stays_empty_and_x_comes_first() -> None:
    from shapely.geometry import Polygon, box

    ring = Polygon(box(-40, -10, 40, 10).exterior.coords, [box(-30, -5, 30, 5).exterior.coords])
    bound = (-50.0, 50.0, 1.0)
    (mask,) = map_masks(_FakeLayers([ring]), ["walkway"], np.eye(4), np.eye(4), bound, bound)
    assert mask[15, 50] == 1  # x = -35, y = 0
    assert mask[50, 50] == 0  # inside the hole
    assert mask[50, 15] == 0  # y = -35
    flipped = np.diag([1.0, -1.0, 1.0, 1.0])
    shift = rigid(np.eye(3), [0.0, 20.0, 0.0])
    (moved,) = map_masks(_FakeLayers([ring]), ["walkway"], np.eye(4), flipped @ shift, bound, bound)
    assert moved[50, 22] == 1  # y = -28 is 8 + 20 mirrored
    assert moved[50, 30] == 0
    assert moved[50, 70] == 0
