"""Time and memory of the LiDAR branch on a GPU: python tests/bench/bench_sparse.py [--batch 4] [--dtype float16].

The full-size encoder (voxels of 0.075 m, four stages of 16 to 128 channels) on simulated clouds of ten sweeps: ground,
walls and boxes, about 230,000 points and 90,000 voxels a sample. `--points FILE.npz` takes clouds (P, 5) from a file.
Compares both backends: first voxels, map and gradients, then time (median, with least and most) and peak memory.
Exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bevctl.config.schema import LidarConfig
from bevctl.models.lidar import WINDOWS, VoxelLidarEncoder
from bevctl.ops import backend
from bevctl.ops.sites import plan_sites
from bevctl.ops.sparse_conv import SparseTensor
from bevctl.ops.voxelize import Voxels, padded_voxels, voxelize

RANGE = (-54.0, -54.0, -5.0, 54.0, 54.0, 3.0)
VOXELS_MS, ENCODER_MS = 2.0, 20.0
"""For the Triton path at batch 4 in FP16; the encoder forward and backward with its tables and norms."""
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Of gradients through 21 layers, relative to their norm."""


@dataclass(frozen=True)
class Cost:
    median_ms: float
    least_ms: float
    most_ms: float
    peak_gib: float


def cloud(seed: int, sweeps: int = 10) -> Tensor:
    """(P, 5) x, y, z (m), intensity, age (s): what 32 beams see of flat ground, walls and boxes, sweep by sweep."""
    draw = np.random.default_rng(seed)
    elevation = np.deg2rad(np.linspace(-30.0, 10.0, 32))[None, :]
    sectors = 360
    wall = np.repeat(np.where(draw.random(90) < 0.65, draw.uniform(10, 50, 90), np.inf), sectors // 90)
    box = np.where(draw.random(sectors) < 0.15, draw.uniform(4, 40, sectors), np.inf)
    rows = []
    for sweep in range(sweeps):
        azimuth = ((np.arange(900) + draw.random()) / 900 * 2 * np.pi)[:, None]
        sector = (azimuth / (2 * np.pi) * sectors).astype(int) % sectors
        slope = np.tan(elevation)
        reach = np.where(slope < -0.001, -1.84 / np.minimum(slope, -0.001), np.inf)
        for distance, height in ((wall[sector], 4.0), (box[sector], 1.6)):
            hit = distance * slope
            reach = np.where((hit > -1.84) & (hit < height - 1.84), np.minimum(reach, distance), reach)
        seen = np.isfinite(reach) & (reach < 75)
        reach = np.where(seen, reach, 0) + draw.normal(0, 0.012, reach.shape)
        x, y = reach * np.cos(azimuth) + 0.05 * sweep, reach * np.sin(azimuth)
        z = reach * slope + 0.02 * np.sin(0.3 * x) + draw.normal(0, 0.012, reach.shape)
        extra = draw.uniform(0, 255, reach.shape), np.full(reach.shape, 0.05 * sweep)
        rows.append(np.stack([x, y, z, *extra], axis=2)[seen])
    points = np.concatenate(rows).astype(np.float32)
    draw.shuffle(points)
    return torch.from_numpy(points)


def measure(run: Callable[[], object], steps: int = 20) -> Cost:
    """Costs of `run` after three warm-up calls; waits of the GPU for the host count."""
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


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def encode(encoder: VoxelLidarEncoder, voxels: Voxels, batch: int, dtype: str, gradient: Tensor | None) -> list[Tensor]:
    """The map, and the gradients of all parameters if there is a gradient to pass back."""
    half = torch.autocast("cuda", dtype=getattr(torch, dtype)) if dtype != "float32" else nullcontext()
    with half:
        sites = plan_sites(voxels.coords, encoder.backbone.in_shape, batch, WINDOWS)
        out = encoder(SparseTensor(voxels.features[: len(sites)], sites))
    if gradient is None:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, list(encoder.parameters()), gradient.to(out.dtype))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float16")
    parser.add_argument("--points", help="clouds to take in place of simulated ones")
    options = parser.parse_args()
    torch.manual_seed(0)
    clouds = [cloud(seed) for seed in range(options.batch)]
    if options.points:
        clouds = [torch.from_numpy(points) for points in np.load(options.points).values()][: options.batch]
    clouds = [points.cuda() for points in clouds]
    config = LidarConfig()
    encoder = VoxelLidarEncoder(config, RANGE).cuda()
    limits = (config.voxel_size, RANGE, config.max_points, config.max_voxels[0])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}")
    print(f"points {[len(points) for points in clouds]}")
    results, costs = {}, {}
    for name in ("torch", "triton"):
        with backend.forced(name):
            exact, voxels = voxelize(clouds, *limits), padded_voxels(clouds, *limits)
            step = partial(encode, encoder, voxels, options.batch, options.dtype)
            gradient = torch.randn(step(None)[0].shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
            results[name] = [exact.features, exact.coords, *step(gradient)]
            costs[name] = {
                "voxels": measure(partial(padded_voxels, clouds, *limits)),
                "forward": measure(partial(step, None)),
                "forward and backward": measure(partial(step, gradient)),
            }
    compare(results["torch"], results["triton"], options.dtype)
    return report(costs, options.batch == 4 and options.dtype == "float16")


def compare(torch_results: list[Tensor], triton_results: list[Tensor], dtype: str) -> None:
    print(f"voxels {torch_results[1][:, 0].bincount().tolist()}")
    assert all(torch.equal(a, b) for a, b in zip(torch_results[:2], triton_results[:2], strict=True))
    errors = [relative(a, b) for a, b in zip(triton_results[2:], torch_results[2:], strict=True)]
    print(
        f"map differs by {errors[0]:.1e}, gradients by {statistics.median(errors[1:]):.1e}, at most {max(errors):.1e}"
    )
    assert statistics.median(errors) < TOLERANCE[dtype]


def report(costs: dict[str, dict[str, Cost]], targets_apply: bool) -> int:
    for name, parts in costs.items():
        for part, cost in parts.items():
            spread = f"{cost.least_ms:.2f}-{cost.most_ms:.2f}"
            print(f"{name:7} {part:21} {cost.median_ms:8.2f} ms ({spread:>13}) {cost.peak_gib:7.3f} GiB")
    kernels = costs["triton"]
    targets = {
        f"voxels within {VOXELS_MS} ms": kernels["voxels"].median_ms <= VOXELS_MS,
        f"encoder within {ENCODER_MS} ms": kernels["forward and backward"].median_ms <= ENCODER_MS,
    }
    for target, met in targets.items() if targets_apply else ():
        print(f"{'met   ' if met else 'MISSED'} {target}")
    return 0 if all(targets.values()) or not targets_apply else 1


if __name__ == "__main__":
    sys.exit(main())
