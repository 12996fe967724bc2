"""The data set as nuscenes-devkit reads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bevctl.batch import CAMERAS, MAP_CLASSES, OBJECT_CLASSES
from bevctl.data.synth import SynthSummary
from bevctl.data.synth.scene import Scene

LAYERS = [*MAP_CLASSES[:-1], "road_divider", "lane_divider"]


def test_counts_match_the_summary(devkit: Any, summary: SynthSummary) -> None:
    kinds = Counter(record["fileformat"] for record in devkit.sample_data)
    assert (len(devkit.sample), len(devkit.sample_annotation)) == (summary.samples, summary.annotations)
    assert (kinds["jpg"], kinds["pcd"]) == (summary.images, summary.sweeps)
    assert summary.samples == 6
    assert summary.sweeps == 2 * 21
    assert summary.images == 2 * 6 * 11
    on_disk = sum(
        path.stat().st_size for path in summary.root.rglob("*") if path.is_file() and path.name != "synth.json"
    )
    assert summary.bytes == on_disk


def test_scenes_belong_to_the_devkits_splits_and_locations_differ(devkit: Any) -> None:
    from nuscenes.utils.splits import create_splits_scenes

    splits = create_splits_scenes()
    locations = {s["name"]: devkit.get("log", s["log_token"])["location"] for s in devkit.scene}
    train = {name for name in locations if name in splits["mini_train"]}
    val = {name for name in locations if name in splits["mini_val"]}
    assert len(train) == 1
    assert len(val) == 1
    assert len(set(locations.values())) == 2


def test_every_token_resolves(devkit: Any) -> None:
    """Every field that names a record of another table finds it, and every token is unique."""
    for table in devkit.table_names:
        records = getattr(devkit, table)
        assert len({record["token"] for record in records}) == len(records)
        for record in records:
            for field, value in record.items():
                if field.endswith("_tokens"):
                    assert all(devkit.get(field.removesuffix("_tokens"), token) for token in value)
                elif field.endswith("_token"):
                    target = {"first_sample": "sample", "last_sample": "sample"}.get(field.removesuffix("_token"))
                    if field in ("first_annotation_token", "last_annotation_token"):
                        target = "sample_annotation"
                    assert devkit.get(target or field.removesuffix("_token"), value)


@pytest.mark.parametrize("table", ["sample", "sample_annotation", "sample_data"])
def test_chains_run_both_ways(devkit: Any, table: str) -> None:
    heads = [record for record in getattr(devkit, table) if record["prev"] == ""]
    seen = 0
    for head in heads:
        record = head
        seen += 1
        while record["next"]:
            after = devkit.get(table, record["next"])
            assert after["prev"] == record["token"]
            record, seen = after, seen + 1
    assert seen == len(getattr(devkit, table))


def test_scene_and_instance_ends_close_their_chains(devkit: Any) -> None:
    for scene in devkit.scene:
        assert devkit.get("sample", scene["first_sample_token"])["prev"] == ""
        assert devkit.get("sample", scene["last_sample_token"])["next"] == ""
    for instance in devkit.instance:
        token, count = instance["first_annotation_token"], 0
        while token:
            record = devkit.get("sample_annotation", token)
            assert record["instance_token"] == instance["token"]
            token, count = record["next"], count + 1
            last = record["token"]
        assert last == instance["last_annotation_token"]
        assert count == instance["nbr_annotations"]


def test_every_scene_has_several_of_every_class_with_valid_attributes(devkit: Any) -> None:
    from nuscenes.eval.detection.utils import category_to_detection_name, detection_name_to_rel_attributes

    for scene in devkit.scene:
        sample = devkit.get("sample", scene["first_sample_token"])
        names: Counter[str] = Counter()
        for token in sample["anns"]:
            record = devkit.get("sample_annotation", token)
            name = category_to_detection_name(record["category_name"])
            attributes = [devkit.get("attribute", a)["name"] for a in record["attribute_tokens"]]
            allowed = detection_name_to_rel_attributes(name)
            assert len(attributes) == (1 if allowed else 0)
            assert set(attributes) <= set(allowed)
            names[name] += 1
        assert set(names) == set(OBJECT_CLASSES)
        assert min(names.values()) >= 2


def test_velocity_is_the_simulated_one(devkit: Any, scenes: dict[str, Scene]) -> None:
    """The devkit differentiates positions; the simulation states the speed along the heading."""
    moving = 0
    for record in devkit.scene:
        scene = scenes[record["name"]]
        sample = devkit.get("sample", devkit.get("sample", record["first_sample_token"])["next"])
        poses = scene.poses(0.5)
        for token in sample["anns"]:
            annotation = devkit.get("sample_annotation", token)
            if not annotation["prev"] or not annotation["next"]:
                continue
            index = int(np.argmin(np.linalg.norm(poses[:, :2] - annotation["translation"][:2], axis=1)))
            solid, yaw = scene.solids[index], poses[index, 3]
            expected = solid.speed * np.array([np.cos(yaw), np.sin(yaw)])
            np.testing.assert_allclose(devkit.box_velocity(token)[:2], expected, atol=0.01)
            moving += solid.speed > 0
    assert moving >= 10


def test_point_counts_are_the_devkits(devkit: Any) -> None:
    from nuscenes.utils.data_classes import LidarPointCloud
    from nuscenes.utils.geometry_utils import points_in_box

    total = 0
    for sample in devkit.sample:
        path, boxes, _ = devkit.get_sample_data(sample["data"]["LIDAR_TOP"])
        points = LidarPointCloud.from_file(path).points[:3]
        for box in boxes:
            counted = int(points_in_box(box, points).sum())
            assert counted == devkit.get("sample_annotation", box.token)["num_lidar_pts"]
            total += counted
    assert total > 2000


def test_files_are_what_the_tables_say(devkit: Any, root: Path) -> None:
    for record in devkit.sample_data:
        path = root / record["filename"]
        assert record["filename"].startswith("samples/" if record["is_key_frame"] else "sweeps/")
        if record["fileformat"] == "jpg":
            with Image.open(path) as image:
                assert image.size == (record["width"], record["height"]) == (160, 90)
            continue
        points = np.fromfile(path, dtype=np.float32).reshape(-1, 5)
        assert len(points) > 3000
        assert np.isfinite(points).all()
        assert set(np.unique(points[:, 4])) <= set(range(32))
        assert 0 <= points[:, 3].min() <= points[:, 3].max() <= 255
        elevation = np.rad2deg(np.arctan2(points[:, 2], np.hypot(points[:, 0], points[:, 1])))
        np.testing.assert_allclose(elevation, -30.67 + points[:, 4] * (10.67 + 30.67) / 31, atol=0.01)


def test_rates_and_the_rig(devkit: Any) -> None:
    for sample in devkit.sample:
        assert set(sample["data"]) == {*CAMERAS, "LIDAR_TOP"}
        lidar = devkit.get("sample_data", sample["data"]["LIDAR_TOP"])
        assert lidar["timestamp"] == sample["timestamp"]
        for channel in CAMERAS:
            camera = devkit.get("sample_data", sample["data"][channel])
            assert 0 < sample["timestamp"] - camera["timestamp"] <= 3_500
            assert camera["ego_pose_token"] != lidar["ego_pose_token"]
    scans = sorted(r["timestamp"] for r in devkit.sample_data if r["channel"] == "LIDAR_TOP")
    assert set(np.diff(scans[:21])) == {50_000}
    for record in devkit.calibrated_sensor:
        channel = devkit.get("sensor", record["sensor_token"])["channel"]
        if channel != "LIDAR_TOP":
            focal = 80.9 if channel == "CAM_BACK" else 126.6
            assert record["camera_intrinsic"][0][0] == pytest.approx(focal, abs=1)


def test_sweeps_belong_to_the_next_keyframe(devkit: Any) -> None:
    for record in devkit.sample_data:
        sample = devkit.get("sample", record["sample_token"])
        if record["channel"] == "LIDAR_TOP":
            assert 0 <= sample["timestamp"] - record["timestamp"] < 500_000


def test_the_map_shows_all_layers_around_every_sample(devkit: Any, root: Path) -> None:
    from nuscenes.map_expansion.map_api import NuScenesMap

    maps = {log["location"]: NuScenesMap(str(root), log["location"]) for log in devkit.log}
    for sample in devkit.sample:
        scene = devkit.get("scene", sample["scene_token"])
        lidar = devkit.get("sample_data", sample["data"]["LIDAR_TOP"])
        x, y, _ = devkit.get("ego_pose", lidar["ego_pose_token"])["translation"]
        nusc_map = maps[devkit.get("log", scene["log_token"])["location"]]
        masks = nusc_map.get_map_mask((x, y, 100, 100), 25.0, LAYERS, (200, 200)).mean(axis=(1, 2))
        assert masks[:5].min() > 0.001
        assert masks[5] + masks[6] > 0.005
        assert masks[0] < 0.6
        assert nusc_map.layers_on_point(x, y)["lane"]


def test_lanes_follow_their_arcs(root: Path, devkit: Any) -> None:
    from nuscenes.map_expansion.map_api import NuScenesMap

    nusc_map = NuScenesMap(str(root), devkit.log[0]["location"])
    for lane in nusc_map.lane:
        path = nusc_map.discretize_lanes([lane["token"]], 5.0)[lane["token"]]
        assert all(nusc_map.layers_on_point(x, y)["lane"] == lane["token"] for x, y, _ in path[2:-2])
        (arc,) = nusc_map.get_arcline_path(lane["token"])
        np.testing.assert_allclose(path[-1][:2], arc["end_pose"][:2], atol=0.05)


def test_the_ego_vehicle_drives_on_the_mask(devkit: Any) -> None:
    from nuscenes.utils.map_mask import MapMask

    for scene in devkit.scene:
        log = devkit.get("log", scene["log_token"])
        mask: MapMask = devkit.get("map", log["map_token"])["mask"]
        sample = devkit.get("sample", scene["first_sample_token"])
        while True:
            lidar = devkit.get("sample_data", sample["data"]["LIDAR_TOP"])
            x, y, _ = devkit.get("ego_pose", lidar["ego_pose_token"])["translation"]
            assert mask.is_on_mask(x, y)
            assert not mask.is_on_mask(x + 100, y + 100) or not mask.is_on_mask(x - 100, y - 100)
            if not sample["next"]:
                break
            sample = devkit.get("sample", sample["next"])
