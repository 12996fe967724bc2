from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapely.affinity import rotate, translate
from shapely.geometry import box as rectangle

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.schema import Config, DataConfig, ModelConfig, PasteConfig, PasteCountsConfig
from bevctl.data.gt_database import write_gt_database
from bevctl.data.index import read_info
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.data.paste import overlaps_from_above, paste_objects
from bevctl.data.sample import Sample
from bevctl.errors import BevctlError
from bevctl.geometry import points_in_boxes

PLACES = st.tuples(st.floats(-4, 4), st.floats(-4, 4), st.floats(0.3, 5), st.floats(0.3, 5), st.floats(-np.pi, np.pi))


def _box(x: float, y: float, length: float, width: float, yaw: float) -> np.ndarray:
    return np.array([x, y, 0.0, length, width, 1.0, yaw, 0.0, 0.0])


@given(first=PLACES, others=st.lists(PLACES, min_size=1, max_size=4))
def test_footprints_overlap_where_polygons_do(first: tuple[float, ...], others: list[tuple[float, ...]]) -> None:
    def polygon(x: float, y: float, length: float, width: float, yaw: float) -> object:
        shape = rectangle(-length / 2, -width / 2, length / 2, width / 2)
        return translate(rotate(shape, yaw, origin=(0, 0), use_radians=True), x, y)

    found = overlaps_from_above(_box(*first), np.stack([_box(*other) for other in others]))
    for other, overlap in zip(others, found, strict=True):
        area = polygon(*first).intersection(polygon(*other)).area  # type: ignore[attr-defined]
        if area > 1e-6:
            assert overlap
        elif polygon(*first).distance(polygon(*other)) > 1e-6:  # type: ignore[attr-defined]
            assert not overlap


def test_corner_to_corner_and_crossing_by_hand() -> None:
    square = _box(0, 0, 2, 2, 0)
    others = np.stack(
        [
            _box(2.0, 0, 2, 2, 0),  # side by side
            _box(2.3, 0, 2, 2, np.pi / 4),  # a corner inside
            _box(2.5, 0, 2, 2, np.pi / 4),  # a corner just outside
            _box(0, 0, 8, 0.2, 1.0),  # through the middle
            _box(1.9, 1.9, 2, 2, np.pi / 4),  # near the corner, apart along the diagonal only
        ]
    )
    np.testing.assert_array_equal(overlaps_from_above(square, others), [False, True, False, True, False])
    assert overlaps_from_above(square, np.zeros((0, 9))).shape == (0,)


@pytest.fixture(scope="module")
def root(synth_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic set with an object database beside it."""
    folder = tmp_path_factory.mktemp("pasted")
    for path in synth_root.iterdir():
        (folder / path.name).symlink_to(path)
    info = read_info(folder / "synth_infos_train.pkl")
    write_gt_database(folder / "gt.npz", info, folder, OBJECT_CLASSES)
    return folder


def _config(root: Path, sweeps: int = 2, **paste: object) -> Config:
    data = DataConfig(
        root=str(root),
        info_train="synth_infos_train.pkl",
        info_val="synth_infos_val.pkl",
        sweeps=sweeps,
        paste=PasteConfig(**{"database": "gt.npz", "min_points": 1, **paste}),  # type: ignore[arg-type]
    )
    return Config(data=data, model=ModelConfig(camera=None))


def _before(config: Config, index: int = 0) -> Sample:
    """A sample as read, before any augmentation."""
    dataset = NuScenesDataset(config, "train")
    info = dataset.info.samples[index]
    return dataset.steps(info, 0)["read points"](dataset.bare_sample(info), np.random.default_rng(0))


def _paste(config: Config, sample: Sample, seed: int = 0) -> Sample:
    assert config.data.paste is not None
    return paste_objects(config, config.data.paste)(sample, np.random.default_rng(seed))


WANTED = PasteCountsConfig(car=30, truck=0, bus=5, pedestrian=0, barrier=0)


@pytest.mark.parametrize("seed", range(5))
def test_objects_are_added_with_their_points(root: Path, seed: int) -> None:
    config = _config(root, counts=WANTED)
    sample = _before(config)
    pasted = _paste(config, sample, seed)
    count = len(sample.boxes)
    new, labels = pasted.boxes[count:], pasted.labels[count:]
    assert len(new) > 3
    np.testing.assert_array_equal(pasted.boxes[:count], sample.boxes)
    np.testing.assert_array_equal(pasted.labels[:count], sample.labels)
    assert pasted.points is not None
    assert sample.points is not None
    # in front, the points of the objects; behind, what was there and lies in no new box
    left = sample.points[~points_in_boxes(sample.points, new).any(axis=0)]
    added = len(pasted.points) - len(left)
    np.testing.assert_array_equal(pasted.points[added:], left)
    inside = points_in_boxes(pasted.points, new, margin=1e-3)
    assert inside.any(axis=1).all()
    assert inside[:, :added].any(axis=0).all()
    assert not points_in_boxes(pasted.points[added:], new).any()
    for i, box in enumerate(new):
        assert not overlaps_from_above(box, np.delete(pasted.boxes, count + i, axis=0)).any()
    classes = set(np.array(OBJECT_CLASSES)[labels])
    assert not classes & {"truck", "pedestrian", "barrier"}


def test_a_class_is_filled_up_and_not_beyond(root: Path) -> None:
    for target in (0, 3, 12):
        counts = PasteCountsConfig(**dict.fromkeys(OBJECT_CLASSES, target))
        config = _config(root, counts=counts)
        sample = _before(config)
        before = np.bincount(sample.labels, minlength=10)
        after = np.bincount(_paste(config, sample).labels, minlength=10)
        assert (after >= before).all()
        assert (after <= np.maximum(before, target)).all()
    assert (after > before).any()


def test_sparse_objects_are_not_pasted_and_sweeps_count(root: Path) -> None:
    everything = PasteCountsConfig(**dict.fromkeys(OBJECT_CLASSES, 50))
    sizes = []
    for sweeps, least in ((0, 1), (2, 1), (2, 60), (2, 10**6)):
        config = _config(root, sweeps=sweeps, counts=everything, min_points=least)
        sample = _before(config)
        pasted = _paste(config, sample)
        new = pasted.boxes[len(sample.boxes) :]
        sizes.append(len(new))
        if len(new):
            assert pasted.points is not None
            assert points_in_boxes(pasted.points, new, margin=1e-3).sum(axis=1).min() >= least
            assert len(np.unique(pasted.points[:, 4].round(3))) <= sweeps + 1
    assert sizes[1] > sizes[2] > sizes[3] == 0
    assert sizes[0] > 0


def test_the_generator_alone_decides(root: Path) -> None:
    config = _config(root, counts=WANTED)
    sample = _before(config)
    first, again, other = (_paste(config, sample, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.points, again.points)  # type: ignore[arg-type]
    np.testing.assert_array_equal(first.boxes, again.boxes)
    assert first.boxes.shape != other.boxes.shape or not np.array_equal(first.boxes, other.boxes)


def test_samples_without_points_or_annotations_are_left_alone(root: Path) -> None:
    config = _config(root)
    sample = _before(config)
    for bare in (dataclasses.replace(sample, points=None), dataclasses.replace(sample, has_boxes=False)):
        assert _paste(config, bare) is bare


def test_it_fades_out_at_its_epoch_and_never_touches_evaluation(root: Path) -> None:
    config = _config(root, counts=WANTED, stop_epoch=2)
    plain = NuScenesDataset(dataclasses.replace(config, data=dataclasses.replace(config.data, paste=None)), "train")
    pasting = NuScenesDataset(config, "train")
    for epoch, same in ((0, False), (1, False), (2, True), (7, True)):
        first, second = plain[(epoch, 1)].sample, pasting[(epoch, 1)].sample
        assert first is not None
        assert second is not None
        assert np.array_equal(first.boxes, second.boxes) == same
        assert np.array_equal(first.points, second.points) == same  # type: ignore[arg-type]
    assert "paste objects" not in NuScenesDataset(config, "val").steps(pasting.info.samples[0], 0)
    still = dataclasses.replace(config, data=dataclasses.replace(config.data, augment=False))
    assert "paste objects" not in NuScenesDataset(still, "train").steps(pasting.info.samples[0], 0)


def test_a_missing_database_is_said_when_training_starts(root: Path) -> None:
    config = _config(root, database="none.npz")
    with pytest.raises(BevctlError, match=r"no object database .*none\.npz"):
        NuScenesDataset(config, "train")
    NuScenesDataset(config, "val")


def test_that_images_do_not_show_pasted_objects_is_said(root: Path) -> None:
    config = _config(root)
    told = "Pasted objects are in the point cloud"
    assert not any(note.startswith(told) for note in NuScenesDataset(config, "train").notes)
    fused = dataclasses.replace(config, model=ModelConfig())
    assert any(note.startswith(told) for note in NuScenesDataset(fused, "train").notes)
    assert not any(note.startswith(told) for note in NuScenesDataset(fused, "val").notes)
