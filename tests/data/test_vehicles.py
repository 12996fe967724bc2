from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.load import load
from bevctl.config.schema import Config, MapHeadConfig
from bevctl.data.info import SampleInfo
from bevctl.data.maps import load_map, map_masks
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.data.vehicles import fill_boxes, vehicle_mask
from bevctl.geometry import Array, points_in_boxes, rigid, rotation_z
from tests.data.drive import Drive

BOUND = (-4.0, 4.0, 1.0)


def test_a_car_by_hand() -> None:
    """4 m along x and 2 m across at (1, 0): centres from -0.5 to 2.5 and from -0.5 to 0.5."""
    expected = np.zeros((8, 8), dtype=np.uint8)
    expected[3:7, 3:5] = 1
    np.testing.assert_array_equal(fill_boxes([[1.0, 0.0, 0.0, 4.0, 2.0, 1.5, 0.0]], BOUND, BOUND), expected)
    turned = fill_boxes([[0.0, 1.0, 0.0, 4.0, 2.0, 1.5, np.pi / 2]], BOUND, BOUND)
    np.testing.assert_array_equal(turned, expected.T)


BOXES = st.lists(
    st.tuples(
        st.floats(-6, 6), st.floats(-6, 6), st.floats(-2, 2), st.floats(0.2, 9), st.floats(0.2, 4), st.floats(0.5, 3),
        st.floats(-10, 10),
    ),
    max_size=5,
)  # fmt: skip


@given(boxes=BOXES)
def test_cells_are_those_whose_centre_a_box_holds(boxes: list[tuple[float, ...]]) -> None:
    """Against the test of points in boxes, all heights let through."""
    rows = np.array(boxes).reshape(-1, 7)
    flat = rows.copy()
    flat[:, 2], flat[:, 5] = 0.0, 1.0
    centres = np.arange(-3.5, 4.0)
    points = np.stack([*np.meshgrid(centres, centres, indexing="ij"), np.zeros((8, 8))], axis=-1).reshape(-1, 3)
    expected = points_in_boxes(points, flat).any(axis=0).reshape(8, 8)
    np.testing.assert_array_equal(fill_boxes(rows, BOUND, BOUND), expected)


def _info(**changes: object) -> SampleInfo:
    boxes = np.array([[2.0, 1.0, 0, 4, 2, 1.5, 0.3, 0, 0], [-2.0, -1.0, 0, 1, 1, 1.8, 0, np.nan, np.nan]])
    sample = Drive().sample(0)
    made = {"boxes": boxes, "names": ("car", "pedestrian"), "valid": np.array([False, True])}
    return dataclasses.replace(sample, **(made | changes))  # type: ignore[arg-type]


def _mask(info: SampleInfo, lidar_aug: Array) -> np.ndarray:
    mask = vehicle_mask(info, lidar_aug, BOUND, BOUND)
    assert mask is not None
    return mask


def test_vehicles_alone_and_without_points_too() -> None:
    info = _info()
    assert info.boxes is not None
    mask = _mask(info, np.eye(4))
    np.testing.assert_array_equal(mask, fill_boxes(info.boxes[:1], BOUND, BOUND))
    assert vehicle_mask(_info(boxes=None), np.eye(4), BOUND, BOUND) is None
    assert not _mask(_info(boxes=np.zeros((0, 9)), names=()), np.eye(4)).any()


def test_vehicles_follow_the_lidar_frame() -> None:
    aug = rigid(rotation_z(np.pi / 2), [0.0, 0.0, 0.0]) @ np.diag([1.0, -1.0, 1.0, 1.0])
    np.testing.assert_array_equal(_mask(_info(), aug), _mask(_info(), np.eye(4)).T)  # x' = y, y' = x


def test_around_the_ego_vehicle_everything_is_further_ahead(config: Config) -> None:
    """The LiDAR stands 0.94 m before the ego vehicle's origin, its x to the right: two cells of 0.47 m along y."""
    head = MapHeadConfig(xbound=(-47.0, 47.0, 0.47), ybound=(-47.0, 47.0, 0.47))
    masks = {}
    for origin in ("lidar", "ego"):
        changed = dataclasses.replace(
            config,
            data=dataclasses.replace(config.data, vehicle_origin=origin),
            model=dataclasses.replace(config.model, map=head),
        )
        sample = NuScenesDataset(changed, "val")[0].sample
        assert sample is not None
        assert sample.bev_map is not None
        masks[origin] = sample.bev_map[1]
    np.testing.assert_array_equal(masks["ego"][:, 2:], masks["lidar"][:, :-2])
    assert masks["lidar"].any()


@pytest.fixture(scope="module")
def config(synth_root: Path) -> Config:
    return load("tiny", sets=[f"data.root={synth_root}", "data.map_classes=[divider, vehicle, drivable_area]"]).config


def test_masks_come_in_the_order_of_the_config(config: Config) -> None:
    dataset = NuScenesDataset(config, "val")
    sample, info = dataset[0].sample, dataset.info_at(0)
    assert sample is not None
    assert sample.bev_map is not None
    head = config.model.map or MapHeadConfig()
    vehicles = vehicle_mask(info, np.eye(4), head.xbound, head.ybound)
    assert vehicles is not None
    np.testing.assert_array_equal(sample.bev_map[1], vehicles)
    layers = ("divider", "drivable_area")
    drawn = map_masks(
        load_map(config.data.root, info.location or ""), layers, info.lidar2global, np.eye(4), head.xbound, head.ybound
    )
    np.testing.assert_array_equal(sample.bev_map[[0, 2]], drawn)
    on_road = sample.bev_map[2].astype(bool)[sample.bev_map[1].astype(bool)].mean()
    assert on_road > 0.5, "most vehicles stand on the road"


def test_vehicles_alone_need_no_map(config: Config, tmp_path: Path) -> None:
    for name in ("samples", "sweeps", "synth_infos_val.pkl"):
        (tmp_path / name).symlink_to(Path(config.data.root) / name)
    data = dataclasses.replace(config.data, root=str(tmp_path), map_classes=("vehicle",))
    dataset = NuScenesDataset(dataclasses.replace(config, data=data), "val")
    sample = dataset[0].sample
    assert sample is not None
    assert sample.bev_map is not None
    assert sample.bev_map.shape[0] == 1
    assert not [note for note in dataset.notes if "map" in note]
