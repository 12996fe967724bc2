from __future__ import annotations

import torch

from bevctl.config.rules import problems
from tests.models.nano import CAMERA_COUNT, IMAGE_SIZE, nano_batch, nano_config


def test_the_config_breaks_no_rule() -> None:
    assert list(problems(nano_config())) == []


def test_overrides_are_dotted_paths() -> None:
    config = nano_config(**{"model.camera": None, "model.object.proposals": 5})
    assert config.model.camera is None
    assert config.model.object is not None
    assert config.model.object.proposals == 5


def test_batch_has_the_shapes_of_the_contract() -> None:
    batch = nano_batch(nano_config(), batch=3)
    assert batch.size == 3
    assert batch.images is not None
    assert batch.images.shape == (3, CAMERA_COUNT, 3, *IMAGE_SIZE)
    assert batch.images.dtype == torch.uint8
    assert batch.bev_map is not None
    assert batch.bev_map.shape == (3, 6, 12, 12)
    assert batch.boxes[0].shape == (3, 9)


def test_batches_repeat_for_a_seed() -> None:
    first, second, other = (nano_batch(nano_config(), seed=seed) for seed in (4, 4, 5))
    assert torch.equal(first.boxes[0].nan_to_num(), second.boxes[0].nan_to_num())
    assert not torch.equal(first.boxes[0].nan_to_num(), other.boxes[0].nan_to_num())
