"""View transforms: geometry, depth raster, splat, names and sizes, and the recorded run."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bevctl import geometry
from bevctl.batch import Calibration
from bevctl.config.schema import ViewTransformConfig
from bevctl.errors import BevctlError
from bevctl.models.view_geometry import frustum_grid, frustum_rays, rasterize_depth
from bevctl.models.view_transform import DepthLSSTransform, LSSTransform, build_view_transform
from tests import golden
from tests.ops.backends import BACKENDS, DEVICES, running

IMAGE = (32, 64)
SMALL = ViewTransformConfig(xbound=(-8.0, 8.0, 1.0), ybound=(-8.0, 8.0, 1.0), dbound=(1.0, 9.0, 1.0), channels=6)


def camera_pose(yaw: float) -> np.ndarray:
    """4×4 camera (x right, y down, z forward) → LiDAR of a level camera that looks along `yaw`."""
    forward, right = (math.cos(yaw), math.sin(yaw), 0.0), (math.sin(yaw), -math.cos(yaw), 0.0)
    return geometry.rigid(np.stack([right, (0.0, 0.0, -1.0), forward], axis=1), (0.5, 0.1, -0.2))


def rig(augmented: bool, batch: int = 2) -> Calibration:
    """Two cameras; `augmented` turns, scales and shifts images and LiDAR frame, another way in each sample."""
    intrinsics = np.eye(4)
    intrinsics[0, 0] = intrinsics[1, 1] = 60.0
    intrinsics[:2, 2] = 64.0, 32.0
    poses = np.stack([camera_pose(0.0), camera_pose(2.5)])
    image_aug, lidar_aug = np.eye(4), np.eye(4)
    image_aug[0, 0] = image_aug[1, 1] = 0.5
    samples = []
    for i in range(batch):
        if augmented:
            turn = geometry.rotation_z(0.3 + i)
            image_aug = np.eye(4)
            image_aug[:2, :2] = 0.5 * geometry.rotation_z(0.1 - 0.3 * i)[:2, :2]
            image_aug[:2, 3] = 3.0, -2.0
            lidar_aug = geometry.rigid(1.1 * np.diag([1.0, -1.0, 1.0]) @ turn, (0.4, -0.3, 0.1))
        samples.append((image_aug, lidar_aug))

    def tensor(values: object) -> Tensor:
        return torch.from_numpy(np.array(values)).float()

    return Calibration(
        intrinsics=tensor([[intrinsics] * 2] * batch),
        camera2lidar=tensor([poses] * batch),
        lidar2image=tensor([[intrinsics @ np.linalg.inv(pose) for pose in poses]] * batch),
        image_aug=tensor([[image] * 2 for image, _ in samples]),
        lidar_aug=tensor([lidar for _, lidar in samples]),
        times=torch.zeros(batch, 2),
    )


def frustum_points(frustum: Tensor, calibration: Calibration) -> Tensor:
    """(B, N, D, h, w, 3) positions in the augmented LiDAR frame, m, of (D, h, w, 3) pixels and depths."""
    rays, origins = frustum_rays(frustum[0, ..., :2], calibration)
    return rays[:, :, None] * frustum[..., 2:] + origins[:, :, None, None, None]


def to_pixels(points: np.ndarray, c: Calibration, sample: int, camera: int) -> np.ndarray:
    """(P, 3) network pixel u, v and depth of (P, 3) augmented LiDAR points, step by step in float64."""
    raw = geometry.transform_points(np.linalg.inv(c.lidar_aug[sample].double().numpy()), points)
    source, depth = geometry.project_points(c.lidar2image[sample, camera].double().numpy(), raw)
    image_aug = c.image_aug[sample, camera].double().numpy()
    pixels = source @ image_aug[:2, :2].T + image_aug[:2, 3]
    return np.concatenate([pixels, depth[:, None]], axis=1)


@pytest.mark.parametrize("augmented", [False, True])
def test_frustum_points_project_back_to_their_pixels(augmented: bool) -> None:
    calibration = rig(augmented)
    frustum = frustum_grid(IMAGE, (4, 8), torch.arange(1.0, 9.0))
    points = frustum_points(frustum, calibration)
    assert points.shape == (2, 2, 8, 4, 8, 3)
    for sample in range(2):
        for camera in range(2):
            pixels = to_pixels(points[sample, camera].reshape(-1, 3).numpy(), calibration, sample, camera)
            np.testing.assert_allclose(pixels, frustum.reshape(-1, 3), atol=2e-4)


def test_frustum_spans_image_and_depth() -> None:
    frustum = DepthLSSTransform(ViewTransformConfig(), (256, 704), 8).frustum
    assert frustum.shape == (118, 32, 88, 3)
    assert frustum[0, 0, 0].tolist() == [0, 0, 1]
    assert frustum[-1, -1, -1].tolist() == [703, 255, 59.5]


@pytest.mark.parametrize("augmented", [False, True])
def test_raster_holds_the_nearest_point_of_each_pixel(augmented: bool) -> None:
    calibration = rig(augmented)
    generator = torch.Generator().manual_seed(0)
    clouds = [torch.rand(900, 5, generator=generator) * 16 - 8 for _ in range(2)]
    before = [cloud.clone() for cloud in clouds]
    raster = rasterize_depth(clouds, calibration, IMAGE)
    assert all(torch.equal(a, b) for a, b in zip(clouds, before, strict=True))

    expected = np.full((2, 2, *IMAGE), np.inf)
    for sample, cloud in enumerate(clouds):
        for camera in range(2):
            for u, v, depth in to_pixels(cloud[:, :3].double().numpy(), calibration, sample, camera):
                if depth > 0 and 0 <= u < IMAGE[1] and 0 <= v < IMAGE[0]:
                    cell = (sample, camera, int(v), int(u))
                    expected[cell] = min(expected[cell], depth)
    expected[np.isinf(expected)] = 0
    assert (expected > 0).sum() > 300
    np.testing.assert_allclose(raster, expected, rtol=1e-4)

    shuffled = [cloud.flip(0) for cloud in clouds]
    assert torch.equal(rasterize_depth(shuffled, calibration, IMAGE), raster)


def test_raster_of_odd_points() -> None:
    """Behind the camera, not finite, none at all."""
    clouds = [torch.tensor([[-5.0, 0.1, 0.0], [math.nan, 0.0, 0.0], [math.inf, 0.0, 0.0]]), torch.empty(0, 3)]
    calibration = rig(False)
    only_front = dataclasses.replace(
        calibration,
        image_aug=calibration.image_aug[:, :1],
        lidar2image=calibration.lidar2image[:, :1],
    )
    assert not rasterize_depth(clouds, only_front, IMAGE).any()


def test_a_lit_pixel_appears_where_the_geometry_puts_it() -> None:
    """All depth in one bin of one pixel of one camera."""
    view = LSSTransform(SMALL, IMAGE, 5)
    calibration = rig(True)
    bins = view.bins
    logits = torch.zeros(2, 2, bins + 6, 4, 8)
    logits[1, 0, 4, 2, 3] = 200.0
    logits[1, 0, bins:, 2, 3] = torch.arange(1.0, 7.0)
    view.downsample = torch.nn.Identity()
    bev = view.splat(logits, calibration)
    x, y = frustum_points(view.frustum, calibration)[1, 0, 4, 2, 3, :2].tolist()
    assert not bev[0].any()
    assert bev[1].nonzero()[:, 1:].unique(dim=0).tolist() == [[math.floor(x + 8), math.floor(y + 8)]]
    torch.testing.assert_close(bev[1].sum(dim=(1, 2)), torch.arange(1.0, 7.0))


def moved(calibration: Calibration, by: float = 0.0) -> Calibration:
    """The same in new tensors; the LiDAR frame shifted along x."""
    copies = {field.name: getattr(calibration, field.name).clone() for field in dataclasses.fields(calibration)}
    copies["lidar_aug"][:, 0, 3] += by
    return Calibration(**copies)


def test_an_index_is_made_once_for_a_calibration() -> None:
    view = LSSTransform(SMALL, IMAGE, 5)
    calibration = rig(True)
    index = view.index(calibration)
    assert view.index(calibration) is index
    assert view.index(moved(calibration)) is index
    other = view.index(moved(calibration, by=1.0))
    assert not torch.equal(other.rows, index.rows)
    again = view.index(calibration)
    assert again is not index
    assert torch.equal(again.rows, index.rows)
    calibration.lidar_aug[:, 0, 3] += 1.0
    assert torch.equal(view.index(calibration).rows, other.rows)


def test_inference_mode_sees_changes_in_place() -> None:
    view = LSSTransform(SMALL, IMAGE, 5)
    with torch.inference_mode():
        calibration = moved(rig(True))
        before = view.index(calibration).rows
        calibration.lidar_aug[:, 0, 3] += 1.0
        assert not torch.equal(view.index(calibration).rows, before)


@pytest.mark.parametrize(("kind", "parameters"), [("depth_lss", 1_610_726), ("lss", 224_166)])
def test_parameters_and_names_of_the_full_transform(kind: str, parameters: int) -> None:
    view = build_view_transform(ViewTransformConfig(kind=kind), 256, (256, 704))
    assert sum(p.numel() for p in view.parameters()) == parameters
    shapes = {name: tuple(value.shape) for name, value in view.state_dict().items()}
    assert shapes["frustum"] == (118, 32, 88, 3)
    assert shapes["dx"] == shapes["bx"] == shapes["nx"] == (3,)
    assert shapes["downsample.6.weight"] == (80, 80, 3, 3)
    assert shapes["depthnet.6.weight" if kind == "depth_lss" else "depthnet.weight"] == (198, 256, 1, 1)
    assert view.nx.tolist() == [360, 360, 1]
    assert view.nx.dtype == torch.int64
    torch.testing.assert_close(view.bx, torch.tensor([-53.85, -53.85, 0.0]))


@pytest.mark.parametrize("kind", ["depth_lss", "lss"])
@pytest.mark.parametrize("downsample", [1, 2])
def test_trains_under_autocast(kind: str, downsample: int) -> None:
    view = build_view_transform(dataclasses.replace(SMALL, kind=kind, downsample=downsample), 5, IMAGE)
    features = torch.randn(2, 2, 5, 4, 8, requires_grad=True)
    points = [torch.rand(50, 5) * 8, torch.empty(0, 5)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bev = view(features, points, rig(True))
    assert bev.shape == (2, 6, 16 // downsample, 16 // downsample)
    assert bev.dtype == torch.bfloat16
    assert bev.is_contiguous(memory_format=torch.channels_last)
    bev.float().square().sum().backward()
    for tensor in (features, *view.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert features.grad is not None
    assert features.grad.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["depth_lss", "lss"])
def test_both_backends_agree(kind: str, device: str) -> None:
    torch.manual_seed(0)
    view = build_view_transform(dataclasses.replace(SMALL, kind=kind), 5, IMAGE).to(device)
    features = torch.randn(2, 2, 5, 4, 8, device=device, requires_grad=True)
    points = [torch.rand(200, 5, device=device) * 8, torch.empty(0, 5, device=device)]
    calibration = Calibration(**{name: value.to(device) for name, value in vars(rig(True)).items()})
    results = []
    for name in BACKENDS:
        with running(name, device):
            bev = view(features, points, moved(calibration))
            results.append((bev, *torch.autograd.grad(bev.square().sum(), features)))
    # On a GPU, convolutions of float32 run in TF32.
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2 * float(expected.detach().abs().max()))


def test_a_raster_replaces_the_points() -> None:
    view = DepthLSSTransform(SMALL, IMAGE, 5).eval()
    features, calibration = torch.randn(2, 2, 5, 4, 8), rig(True)
    points = [torch.rand(200, 5) * 8] * 2
    raster = rasterize_depth(points, calibration, IMAGE)
    from_points = view(features, points, calibration)
    assert torch.equal(from_points, view(features, None, calibration, depth_raster=raster))
    assert not torch.equal(from_points, view(features, None, calibration, depth_raster=torch.zeros_like(raster)))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(BevctlError, match=r"\(30, 64\)"):
        LSSTransform(SMALL, (30, 64), 5)
    with pytest.raises(BevctlError, match=r"\[16, 16, 2\]"):
        LSSTransform(dataclasses.replace(SMALL, zbound=(-10.0, 10.0, 10.0)), IMAGE, 5)
    view = DepthLSSTransform(SMALL, IMAGE, 5)
    with pytest.raises(ValueError, match=r"got \(2, 2, 5, 4, 7\)"):
        view(torch.zeros(2, 2, 5, 4, 7), [], rig(False))
    with pytest.raises(BevctlError, match="no LiDAR points"):
        view(torch.zeros(2, 2, 5, 4, 8), None, rig(False))


@golden.needs_golden
def test_recorded_geometry() -> None:
    view = LSSTransform(ViewTransformConfig(), (256, 704), 8)
    golden.assert_matches("view_transform.geometry", frustum_points(view.frustum, golden.calibration()))


@golden.needs_golden
def test_recorded_raster() -> None:
    """The same pixels; where several points fall in one, the record holds any of them and ours the nearest."""
    recorded = golden.depth_raster()
    ours = rasterize_depth(golden.points(), golden.calibration(), (256, 704))
    lit = recorded > 0
    assert ((ours > 0) != lit).sum() <= 1e-3 * lit.sum()
    both = lit & (ours > 0)
    assert (ours[both] <= recorded[both] + 1e-3).float().mean() > 0.999
    assert ((ours[both] - recorded[both]).abs() < 1e-3).float().mean() > 0.9
