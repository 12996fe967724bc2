"""Targets, matching, losses and the optimizer's update against their torch references, at the size of real training.

`python tests/bench/bench_targets.py`; needs a GPU that Triton supports. Numbers are compared before
anything is timed. Exits 1 where a target is missed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bevctl.batch import Batch, Calibration
from bevctl.engine.one_pass_adamw import OnePassAdamW
from bevctl.models.box_coder import CODE_WEIGHTS, BevGrid, encode
from bevctl.models.detection_loss import DetectionLosses, detection_losses
from bevctl.ops.backend import forced
from bevctl.ops.matching import match

CUDA = torch.device("cuda")
GRID = BevGrid((-54.0, -54.0), (0.6, 0.6), (180, 180))
BATCH, QUERIES, CLASSES, OBJECTS = 4, 200, 10, 30
REPEATS = 30
LIMIT_MS = 8.0
"""For targets and losses at batch 4."""


def milliseconds(work: Callable[[], object]) -> tuple[float, float]:
    """Median of the device's and of the host's time for `work`."""
    for _ in range(3):
        work()
    device, host = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        start.record()
        work()
        end.record()
        host.append((time.perf_counter() - started) * 1e3)
        end.synchronize()
        device.append(start.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def report(name: str, work: Callable[[], object]) -> float:
    """Prints both backends; returns the larger of the kernels' device and host time."""
    device = host = 0.0
    for backend in ("torch", "triton"):
        with forced(backend):
            device, host = milliseconds(work)
        print(f"{name:42} {backend:6} device {device:8.3f} ms   host {host:8.3f} ms")
    return max(device, host)


def check(name: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
    if not error <= tolerance:
        sys.exit(f"{name} is off by {error:.2e}")


def bench_matching(objects: int, crowded: bool) -> None:
    """`crowded`: all objects want the same queries, the slowest case there is."""
    spread = torch.rand(BATCH, QUERIES, objects, device=CUDA)
    cost = torch.rand(BATCH, QUERIES, 1, device=CUDA) + 0.01 * spread if crowded else spread
    totals = []
    for backend in ("torch", "triton"):
        with forced(backend):
            matched = match(cost, [objects] * BATCH)
        chosen = cost.gather(2, matched.clamp(min=0)[..., None])[..., 0]
        totals.append(torch.where(matched >= 0, chosen, 0.0).sum())
    check("matching", totals[1], totals[0], 1e-6)
    report(f"matching, {objects} objects{', crowded' if crowded else ''}", lambda: match(cost, [objects] * BATCH))


def street(generator: torch.Generator) -> Batch:
    """Only what the losses read."""
    scale = torch.tensor([100.0, 100.0, 2.0, 4.0, 1.5, 1.5, 6.0, 4.0, 4.0])
    centre = torch.tensor([0.0, 0.0, -1.0, 3.0, 1.5, 1.5, 0.0, 0.0, 0.0])
    nowhere = torch.zeros(BATCH, 0, 4, 4)
    return Batch(
        images=None,
        points=None,
        calibration=Calibration(nowhere, nowhere, nowhere, nowhere, torch.zeros(BATCH, 4, 4), torch.zeros(BATCH, 0)),
        boxes=[(torch.rand(OBJECTS, 9, generator=generator) - 0.5) * scale + centre for _ in range(BATCH)],
        labels=[torch.randint(0, CLASSES, (OBJECTS,), generator=generator) for _ in range(BATCH)],
        bev_map=None,
        has_boxes=torch.ones(BATCH, dtype=torch.bool),
        has_map=torch.zeros(BATCH, dtype=torch.bool),
    ).to(CUDA)


def bench_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = street(generator)
    heatmap = torch.randn(BATCH, CLASSES, *GRID.shape, generator=generator).to(CUDA) - 2
    logits = torch.randn(BATCH, QUERIES, CLASSES, generator=generator).to(CUDA) - 2
    codes = torch.stack([encode(boxes.repeat(7, 1)[:QUERIES], GRID) for boxes in batch.boxes])
    codes = codes + 0.3 * torch.randn(codes.shape, generator=generator).to(CUDA)
    leaves = [value.requires_grad_() for value in (heatmap, logits, codes)]
    weights = torch.tensor(CODE_WEIGHTS, device=CUDA)

    def run() -> DetectionLosses:
        for leaf in leaves:
            leaf.grad = None
        losses = detection_losses(heatmap, logits, codes, batch, GRID, weights)
        (losses.heatmap + losses.classes + losses.boxes).backward()
        return losses

    found: list[list[Tensor]] = []
    for backend in ("torch", "triton"):
        with forced(backend):
            losses = run()
        scalars = [losses.heatmap, losses.classes, losses.boxes]
        found.append([*(value.detach() for value in scalars), *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    for expected, value in zip(*found, strict=True):
        check("losses", value, expected, 1e-5)
    if report("targets and losses, forward + backward", run) > LIMIT_MS:
        sys.exit(f"targets and losses take more than {LIMIT_MS} ms")


def bench_update() -> None:
    """As many parameters, of as many sizes, as the detection model has."""
    generator = torch.Generator(CUDA).manual_seed(0)
    sizes = [64] * 300 + [40_000] * 120 + [300_000] * 60 + [1_000_000] * 17
    parameters = [nn.Parameter(torch.randn(size, device=CUDA, generator=generator)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, device=CUDA, generator=generator)
    optimizer.step()
    kernels, one, zero = OnePassAdamW(optimizer), torch.ones((), device=CUDA), torch.zeros((), device=CUDA)

    def with_torch() -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, 35.0)
        optimizer.step()
        return norm

    def with_kernels() -> Tensor:
        kernels.prepare()
        norm = torch.linalg.vector_norm(kernels.norms(one))
        kernels.step((35.0 / (norm + 1e-6)).clamp(max=1.0), zero)
        return norm

    expected = nn.utils.clip_grad_norm_(parameters, float("inf"))
    check("norm", with_kernels(), expected, 1e-5)
    for name, work in (("torch", with_torch), ("triton", with_kernels)):
        device, host = milliseconds(work)
        print(f"{'norm, clip and AdamW of 497 parameters':42} {name:6} device {device:8.3f} ms   host {host:8.3f} ms")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This needs a GPU.")
    print(torch.cuda.get_device_name(), torch.__version__)
    for objects, crowded in ((30, False), (100, False), (100, True)):
        bench_matching(objects, crowded)
    bench_losses()
    bench_update()


if __name__ == "__main__":
    main()
