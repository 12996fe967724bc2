"""Time and memory of lift-splat on a GPU: python tests/bench/bench_lift_splat.py [--batch 4] [--dtype float16].

Six cameras as on the nuScenes car, augmented as in training; 118 depth bins, 32 × 88 feature cells, 80 channels,
360 × 360 cells. Compares both backends with a reference that holds the outer product: first the results, then time
(median, with least and most) and peak memory of forward and backward. Exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bevctl import geometry
from bevctl.batch import Calibration
from bevctl.config.schema import ViewTransformConfig
from bevctl.models.view_geometry import frustum_rays
from bevctl.models.view_transform import LSSTransform
from bevctl.ops import backend
from bevctl.ops.bev_pool import frustum_cells, lift_splat

IMAGE = (256, 704)
YAWS = (0.0, -55.0, 55.0, 180.0, 110.0, -110.0)
LIMIT_MS, LIMIT_GIB = 5.0, 0.6
"""For the Triton path at batch 4 with the index."""


@dataclass(frozen=True)
class Cost:
    median_ms: float
    least_ms: float
    most_ms: float
    peak_gib: float


def calibration(batch: int) -> Calibration:
    """A car's ring of cameras; every image and every LiDAR frame turned, scaled and shifted another way."""
    draw = torch.Generator().manual_seed(0)
    intrinsics = torch.eye(4, dtype=torch.float64)
    intrinsics[0, 0] = intrinsics[1, 1] = 1266.4
    intrinsics[:2, 2] = torch.tensor([816.3, 491.5])
    poses = torch.stack([_pose(math.radians(yaw)) for yaw in YAWS])
    image_aug = torch.stack([_image_aug(draw) for _ in range(batch * len(YAWS))]).unflatten(0, (batch, len(YAWS)))
    lidar_aug = torch.stack([_lidar_aug(draw) for _ in range(batch)])
    tensors = (
        intrinsics.expand(batch, len(YAWS), 4, 4),
        poses.expand(batch, -1, 4, 4),
        (intrinsics @ torch.linalg.inv(poses)).expand(batch, -1, 4, 4),
        image_aug,
        lidar_aug,
        torch.zeros(batch, len(YAWS)),
    )
    return Calibration(*(tensor.float().cuda() for tensor in tensors))


def _pose(yaw: float) -> Tensor:
    """Camera (x right, y down, z forward) → LiDAR."""
    forward, right = (math.cos(yaw), math.sin(yaw)), (math.sin(yaw), -math.cos(yaw))
    columns = torch.tensor([[*right, 0.0], [0.0, 0.0, -1.0], [*forward, 0.0], [forward[0], forward[1] / 2, -0.3]])
    return torch.cat([columns.T, torch.tensor([[0.0, 0.0, 0.0, 1.0]])]).double()


def _image_aug(draw: torch.Generator) -> Tensor:
    angle, scale = _uniform(draw, -0.094, 0.094), _uniform(draw, 0.38, 0.55)
    out = torch.eye(4, dtype=torch.float64)
    out[:2, :2] = scale * torch.from_numpy(geometry.rotation_z(angle)[:2, :2].copy())
    out[:2, 3] = torch.tensor([IMAGE[1] / 2, IMAGE[0] / 2]) - out[:2, :2] @ torch.tensor([800.0, 640.0]).double()
    return out


def _lidar_aug(draw: torch.Generator) -> Tensor:
    turn = torch.from_numpy(geometry.rotation_z(_uniform(draw, -0.78, 0.78)).copy())
    out = torch.eye(4, dtype=torch.float64)
    out[:3, :3] = _uniform(draw, 0.9, 1.1) * turn
    out[:3, 3] = 0.5 * torch.randn(3, generator=draw)
    return out


def _uniform(draw: torch.Generator, low: float, high: float) -> float:
    return low + (high - low) * torch.rand((), generator=draw).item()


def materialised(view: LSSTransform, logits: Tensor, calib: Calibration) -> Tensor:
    """The reference, with its index: outer product as a tensor, points outside left out, one indexed addition."""
    rays, origins = frustum_rays(view.frustum[0, ..., :2], calib)
    bounds = (view.bx - view.dx / 2, view.dx, view.nx)
    cells = frustum_cells(rays, origins, view.frustum[:, 0, 0, 2].contiguous(), bounds)
    x, y = view.grid
    rows = (cells + torch.arange(len(cells), device="cuda").view(-1, 1, 1, 1, 1) * x * y)[cells >= 0]
    depth = logits[:, :, : view.bins].float().softmax(dim=2).permute(0, 1, 3, 4, 2)
    product = depth[..., None] * logits[:, :, view.bins :].permute(0, 1, 3, 4, 2)[:, :, :, :, None].float()
    out = product.new_zeros(len(cells) * x * y, view.channels).index_add(0, rows, product[cells >= 0])
    return out.view(len(cells), x, y, -1).permute(0, 3, 1, 2)


def ours(view: LSSTransform, logits: Tensor, calib: Calibration) -> Tensor:
    return lift_splat(logits, view._index(calib))


def measure(run: Callable[[], object], steps: int = 20) -> Cost:
    """Costs of `run` after three warm-up calls."""
    times = []
    for _ in range(steps + 3):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    peak = torch.cuda.max_memory_allocated() - before
    return Cost(statistics.median(times[3:]), min(times[3:]), max(times[3:]), peak / 2**30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=("float16", "bfloat16", "float32"), default="float16")
    options = parser.parse_args()
    torch.manual_seed(0)
    view = LSSTransform(ViewTransformConfig(), IMAGE, 8).cuda()
    calib = calibration(options.batch)
    pixels = torch.randn(options.batch, len(YAWS), *view.feature_size, view.bins + view.channels, device="cuda")
    logits = pixels.to(getattr(torch, options.dtype)).permute(0, 1, 4, 2, 3).requires_grad_()
    gradient = torch.randn(options.batch, view.channels, *view.grid, device="cuda")

    def both_ways(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        pooled = function(view, logits, calib)
        (of_logits,) = torch.autograd.grad(pooled, logits, gradient.to(pooled.dtype))
        return pooled.detach(), of_logits

    expected = both_ways(materialised)
    costs = {"materialised": measure(lambda: both_ways(materialised))}
    for name in ("torch", "triton"):
        with backend.forced(name):
            for found, exactly in zip(both_ways(ours), expected, strict=True):
                error = float((found.float() - exactly.float()).norm() / exactly.float().norm())
                assert error < (1e-5 if options.dtype == "float32" else 1e-2), (name, error)
            costs[name] = measure(lambda: both_ways(ours))
    return report(costs)


def report(costs: dict[str, Cost]) -> int:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; index, forward and backward")
    for name, cost in costs.items():
        spread = f"{cost.least_ms:.2f}-{cost.most_ms:.2f}"
        print(f"{name:14} {cost.median_ms:8.2f} ms ({spread:>13}) {cost.peak_gib:7.3f} GiB")
    whole, plain, kernels = costs["materialised"], costs["torch"], costs["triton"]
    targets = {
        f"Triton at most {LIMIT_MS} ms": kernels.median_ms <= LIMIT_MS,
        f"Triton at most {LIMIT_GIB} GiB": kernels.peak_gib <= LIMIT_GIB,
        "torch no slower than the materialised form": plain.median_ms <= whole.median_ms,
        "torch in half of its memory": 2 * plain.peak_gib <= whole.peak_gib,
    }
    for target, met in targets.items():
        print(f"{'met   ' if met else 'MISSED'} {target}")
    return 0 if all(targets.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
