"""Positions of image features against plain float64 computations, and what motion and augmentation do to them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bevctl.batch import Calibration
from bevctl.config.schema import PetrConfig
from bevctl.models.petrv2 import feature_pixels
from bevctl.models.petrv2_position import (
    EPSILON,
    FeatureGuidance,
    FrustumEncoder,
    ImagePositions,
    depth_bins,
    inverse_sigmoid,
    sine_embedding,
)
from bevctl.models.view_geometry import frustum_rays
from tests.models.rig import rig_calibration

CONFIG = PetrConfig(hidden=16, depth_bins=5, layers=1, attention_heads=2, ffn=16)
IMAGE, FEATURES = (64, 160), (4, 10)


def augmented(calibration: Calibration, seed: int = 0) -> Calibration:
    """Images resized, cropped and flipped; the scene rotated, scaled and shifted."""
    generator = torch.Generator().manual_seed(seed)
    image = calibration.image_aug.clone()
    scale, flip = 0.4 + 0.3 * torch.rand(2, generator=generator), -1.0
    image[..., 0, 0], image[..., 1, 1] = flip * scale[0], scale[0]
    image[..., 0, 3], image[..., 1, 3] = 150.0, -12.5
    return dataclasses.replace(calibration, image_aug=image, lidar_aug=pose(0.4, (0.3, -0.7, 0.1), 1.05)[None])


def pose(yaw: float, shift: tuple[float, float, float], scale: float = 1.0) -> Tensor:
    matrix = torch.eye(4)
    matrix[:2, :2] = torch.tensor([[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]])
    matrix[:3, :3] *= scale
    matrix[:3, 3] = torch.tensor(shift)
    return matrix


def coordinates(calibration: Calibration, encoder: FrustumEncoder) -> Tensor:
    return encoder.coordinates(*frustum_rays(feature_pixels(IMAGE, FEATURES, torch.device("cpu")), calibration))


def reference_coordinates(c: Calibration, config: PetrConfig) -> Tensor:
    """Every point by itself: image pixel and depth, out of the augmented image, into the augmented LiDAR frame."""
    low, high = torch.tensor(config.position_range, dtype=torch.float64).view(2, 3)
    n, start, end = config.depth_bins, config.depth_start, config.position_range[3]
    views = c.intrinsics.shape[1]
    out = torch.zeros(len(c.intrinsics), views, *FEATURES, n, 3, dtype=torch.float64)
    for view in range(views):
        to_lidar = torch.linalg.inv(c.lidar2image[0, view].double())
        from_network = torch.linalg.inv(c.image_aug[0, view].double())
        for row in range(FEATURES[0]):
            for column in range(FEATURES[1]):
                u, v = column * IMAGE[1] / FEATURES[1], row * IMAGE[0] / FEATURES[0]
                source = from_network @ torch.tensor([u, v, 0.0, 1.0], dtype=torch.float64)
                for index in range(n):
                    d = start + (end - start) / (n * (n + 1)) * index * (index + 1)
                    seen = torch.tensor([source[0] * d, source[1] * d, d, 1.0], dtype=torch.float64)
                    point = (c.lidar_aug[0].double() @ to_lidar @ seen)[:3]
                    share = ((point - low) / (high - low)).clamp(0, 1)
                    out[0, view, row, column, index] = (share.clamp(min=EPSILON) / (1 - share).clamp(min=EPSILON)).log()
    return out.flatten(-2)


def test_depth_bins_grow_linearly_to_just_before_the_end() -> None:
    bins = depth_bins(64, 1.0, 61.2)
    assert bins[0] == 1.0
    assert bins[-1].item() == pytest.approx(1 + 60.2 / (64 * 65) * 63 * 64)
    steps = bins.diff()
    torch.testing.assert_close(steps.diff(), torch.full((62,), 2 * 60.2 / (64 * 65)), rtol=1e-3, atol=1e-5)


@given(st.floats(-0.5, 1.5))
def test_inverse_sigmoid_is_the_inverse_inside_its_bounds(x: float) -> None:
    expected = min(max(x, EPSILON), 1 - EPSILON)
    found = inverse_sigmoid(torch.tensor(x, dtype=torch.float64)).sigmoid().item()
    assert found == pytest.approx(expected, abs=1.1e-5 * 1e-3 + 1e-9 if EPSILON < x < 1 - EPSILON else 1e-9)


def test_inverse_sigmoid_has_the_right_gradient() -> None:
    x = torch.tensor([0.02, 0.3, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(inverse_sigmoid, (x,))


def test_sine_embedding_by_hand() -> None:
    found = sine_embedding(torch.tensor([0.0, 1.5]), 4)
    expected = [[0.0, 1.0, 0.0, 1.0], [math.sin(1.5), math.cos(1.5), math.sin(0.015), math.cos(0.015)]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize("seed", [0, 1])
def test_coordinates_are_those_of_every_point_by_itself(seed: int) -> None:
    calibration = augmented(rig_calibration(1, IMAGE, 2), seed)
    found = coordinates(calibration, FrustumEncoder(CONFIG))
    expected = reference_coordinates(calibration, CONFIG)
    # At the ends a logit is steep: there float32 of a share is what counts.
    torch.testing.assert_close(found.double().sigmoid(), expected.sigmoid(), rtol=0, atol=2e-6)
    inside = expected.abs() < 6
    torch.testing.assert_close(found.double()[inside], expected[inside], rtol=0, atol=2e-3)
    assert inside.float().mean() > 0.3


def test_the_earlier_frame_of_a_car_that_stood_sees_the_same_places() -> None:
    still = rig_calibration(1, IMAGE, 1)
    twice = dataclasses.replace(
        still,
        **{
            name: torch.cat([getattr(still, name)] * 2, dim=1)
            for name in ("intrinsics", "camera2lidar", "lidar2image", "image_aug", "times")
        },
    )
    found = coordinates(augmented(twice), FrustumEncoder(CONFIG))
    torch.testing.assert_close(found[:, :6], found[:, 6:], rtol=0, atol=0)


@pytest.mark.parametrize(("yaw", "shift"), [(0.3, (2.0, -1.0, 0.2)), (-1.2, (0.0, 6.0, 0.0))])
def test_a_moved_car_sees_a_standing_point_in_one_place(yaw: float, shift: tuple[float, float, float]) -> None:
    """A point that both frames see through one pixel each has the same coordinates from either."""
    motion = pose(yaw, shift)  # the earlier LiDAR frame → the current one
    now = rig_calibration(1, IMAGE, 1)
    before = dataclasses.replace(now, camera2lidar=motion @ now.camera2lidar)
    point = torch.tensor([3.0, 14.0, 0.5])
    for calibration in (now, before):
        projected = (
            calibration.intrinsics @ torch.linalg.inv(calibration.camera2lidar) @ torch.cat([point, torch.ones(1)])
        )
        depth = projected[0, :, 2]
        view = int(((projected[0, :, :2] / depth[:, None]).abs().sum(-1) + 1e6 * (depth < 1)).argmin())
        pixel = (projected[0, view, :2] / depth[view]).view(1, 1, 2)
        rays, origins = frustum_rays(pixel, calibration)
        found = rays[0, view, 0, 0] * depth[view] + origins[0, view]
        torch.testing.assert_close(found, point, rtol=0, atol=1e-4)


def test_turning_the_scene_is_turning_the_cameras() -> None:
    calibration, turn = rig_calibration(1, IMAGE, 2), pose(0.7, (1.0, 2.0, 0.0))
    turned = dataclasses.replace(calibration, camera2lidar=turn @ calibration.camera2lidar)
    rotated = dataclasses.replace(calibration, lidar_aug=turn[None])
    encoder = FrustumEncoder(CONFIG)
    torch.testing.assert_close(coordinates(turned, encoder), coordinates(rotated, encoder), rtol=0, atol=1e-3)


def test_flipped_images_have_flipped_places() -> None:
    calibration = rig_calibration(1, IMAGE, 1)
    flipped = calibration.image_aug.clone()
    flipped[..., 0, 0], flipped[..., 0, 3] = -1, IMAGE[1] * (1 - 1 / FEATURES[1])
    encoder = FrustumEncoder(CONFIG)
    found = coordinates(dataclasses.replace(calibration, image_aug=flipped), encoder)
    torch.testing.assert_close(found.flip(3), coordinates(calibration, encoder), rtol=0, atol=1e-3)


def test_places_count_what_is_not_padding() -> None:
    positions = ImagePositions(CONFIG, 8)
    padding = torch.zeros(2, 3, 4, 5, dtype=torch.bool)
    padding[1, :, 3], padding[1, 2] = True, True
    found = positions._places((2, 3, 4, 5), padding, torch.device("cpu"))
    plain = positions._places((2, 3, 4, 5), None, torch.device("cpu"))
    torch.testing.assert_close(found[0], plain[0])
    for view, row, column, shares in ((0, 0, 0, (1 / 2, 1 / 3, 1 / 5)), (1, 2, 4, (1.0, 1.0, 1.0))):
        expected = [sine_embedding(torch.tensor(2 * math.pi * share), CONFIG.hidden // 2) for share in shares]
        torch.testing.assert_close(found[1, view, row, column], torch.cat(expected), rtol=0, atol=1e-4)


def test_features_guide_their_positions() -> None:
    guidance = FeatureGuidance(3).double()
    position, features = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 3).double()
    reduce, expand = guidance.conv_reduce, guidance.conv_expand
    hidden = torch.relu(features @ reduce.weight[..., 0, 0].T + reduce.bias)
    gate = 1 / (1 + torch.exp(-(hidden @ expand.weight[..., 0, 0].T + expand.bias)))
    torch.testing.assert_close(guidance(position, features), position * gate)


def test_keys_are_values_with_places() -> None:
    torch.manual_seed(0)
    positions = ImagePositions(CONFIG, 8)
    calibration = rig_calibration(2, IMAGE, 1)
    rays, origins = frustum_rays(feature_pixels(IMAGE, FEATURES, torch.device("cpu")), calibration)
    features = torch.randn(2, 6, 8, *FEATURES)
    values, keys = positions(features, rays, origins, None)
    assert values.shape == keys.shape == (2, 6 * 40, 16)
    projected = torch.einsum("bvchw,kc->bvhwk", features, positions.input_proj.weight[..., 0, 0])
    torch.testing.assert_close(values, (projected + positions.input_proj.bias).flatten(1, 3))
    others, other_keys = positions(features + 1, rays, origins, None)
    assert not torch.allclose(other_keys - others, keys - values)  # positions depend on what the feature shows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_coordinates_stay_exact_under_autocast(dtype: torch.dtype) -> None:
    encoder, calibration = FrustumEncoder(CONFIG), rig_calibration(1, IMAGE, 2)
    expected = coordinates(calibration, encoder)
    with torch.autocast("cpu", dtype):
        found = coordinates(calibration, encoder)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert found.abs().max() <= math.log(1 / EPSILON) + 1e-3
