from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bevctl.batch import OBJECT_CLASSES
from bevctl.config.schema import Config
from bevctl.data.balance import balanced_positions, frames_by_class
from bevctl.data.info import SampleInfo
from bevctl.data.loader import EpochSampler, make_loader
from bevctl.data.nuscenes import NuScenesDataset
from bevctl.errors import BevctlError, ExitCode
from tests.data.sets import write_set


def _frame(*names: str, invalid: tuple[int, ...] = ()) -> SampleInfo:
    valid = np.array([i not in invalid for i in range(len(names))], dtype=bool)
    counts = np.ones(len(names), dtype=np.int64)
    boxes = np.zeros((len(names), 9))
    return SampleInfo("t", 0.0, "l", np.eye(4), np.eye(4), {}, (), boxes, names, counts, counts, valid)


FRAMES = [
    *[_frame("car", "car") for _ in range(30)],
    *[_frame("car", "bus") for _ in range(6)],
    _frame("bicycle"),
    _frame("trailer", invalid=(0,)),
    _frame("ignored"),
]


def test_frames_count_once_for_each_class_that_they_show() -> None:
    frames = frames_by_class(FRAMES, OBJECT_CLASSES)
    assert {name: len(found) for name, found in frames.items()} == {"car": 36, "bus": 6, "bicycle": 1}
    np.testing.assert_array_equal(frames["bus"], range(30, 36))


def test_each_class_is_drawn_equally_often_and_the_sum_stays() -> None:
    positions = balanced_positions(FRAMES, OBJECT_CLASSES, 0)
    assert len(positions) == 3 * (43 // 3)
    drawn = Counter(positions.tolist())
    assert drawn[36] == 14  # the only bicycle
    assert drawn[37] == drawn[38] == 0
    cars, buses, bicycles = np.split(positions, 3)
    assert set(cars) <= set(range(36))
    assert set(buses) <= set(range(30, 36))
    assert set(bicycles) == {36}


def test_the_draw_depends_on_the_seed_alone() -> None:
    np.testing.assert_array_equal(
        balanced_positions(FRAMES, OBJECT_CLASSES, 3), balanced_positions(FRAMES, OBJECT_CLASSES, 3)
    )
    assert not np.array_equal(
        balanced_positions(FRAMES, OBJECT_CLASSES, 3), balanced_positions(FRAMES, OBJECT_CLASSES, 4)
    )


def test_a_set_without_objects_is_refused() -> None:
    with pytest.raises(BevctlError, match=r"data\.cbgs: no training sample") as caught:
        balanced_positions(FRAMES[-1:], OBJECT_CLASSES, 0)
    assert caught.value.code == ExitCode.USAGE


@pytest.fixture
def config(tmp_path: Path, jpeg: bytes) -> Config:
    config = write_set(tmp_path, jpeg, count=7)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cbgs=True))


def test_training_goes_through_the_draw_and_evaluation_does_not(config: Config) -> None:
    """Each sample has a car and a pedestrian (the barrier has no point): 2 × 7 draws."""
    dataset = NuScenesDataset(config, "train")
    assert len(dataset) == 14
    assert len(NuScenesDataset(config, "val")) == 7
    assert dataset.notes[0].startswith("CBGS draws 14 times from 7 samples; there are no objects of truck, ")
    order = balanced_positions(dataset.info.samples, config.data.classes, config.seed)
    tokens = [item.sample.token for i in range(14) if (item := dataset[(2, i)]).sample is not None]
    assert tokens == [f"sample-{position}" for position in order]


def test_a_sample_drawn_twice_is_augmented_twice(config: Config) -> None:
    dataset = NuScenesDataset(config, "train")
    order = balanced_positions(dataset.info.samples, config.data.classes, config.seed).tolist()
    twice = next(position for position, count in Counter(order).items() if count > 1)
    first, second = [i for i, position in enumerate(order) if position == twice][:2]
    samples = dataset[(0, first)].sample, dataset[(0, second)].sample
    assert samples[0] is not None
    assert samples[1] is not None
    assert samples[0].token == samples[1].token
    assert not np.array_equal(samples[0].lidar_aug, samples[1].lidar_aug)


def test_skipped_samples_stay_out_of_the_draw(config: Config) -> None:
    full = NuScenesDataset(config, "train")
    data = dataclasses.replace(config.data, skip_samples=("sample-2",))
    dataset = NuScenesDataset(dataclasses.replace(config, data=data), "train")
    assert len(dataset) == len(full)
    tokens = {item.sample.token for i in range(14) if (item := dataset[i]).sample is not None}
    assert "sample-2" not in tokens


def test_a_stop_in_the_middle_changes_nothing(config: Config) -> None:
    """Another process, other workers, and the rest of the epoch: the same batches to the bit."""

    def batches(start: int, workers: int) -> list[tuple[list[str], list[float]]]:
        dataset = NuScenesDataset(config, "train")
        sampler = EpochSampler(len(dataset), 2, epoch=1, start_batch=start)
        loaded = make_loader(dataset, sampler, workers=workers)
        return [(batch.tokens, batch.calibration.lidar_aug.flatten().tolist()) for batch in loaded]

    whole = batches(0, 0)
    assert len(whole) == 7
    assert batches(3, 2) == whole[3:]
