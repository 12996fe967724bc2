"""Time and memory of the image backbone on a GPU: python tests/bench/bench_swin.py [--images 24] [--dtype float16].

Swin-T on 256 × 704 images, forward and backward, with each choice of kernels; recorded as CUDA graphs, as training runs
it, recomputed, and compiled; first that the kernels agree. Medians with least and most, and peak memory above what is
there before, without what lies in graphs. Exits 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bevctl.config.schema import SwinConfig
from bevctl.engine.compilation import compile_parts
from bevctl.engine.cuda_graphs import record_parts
from bevctl.models.swin import SwinTransformer
from bevctl.ops import backend

IMAGE = (256, 704)
LIMIT_MS = 32.0
"""For the recorded Triton path in FP16 on 24 images."""
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Cost:
    median_ms: float
    least_ms: float
    most_ms: float
    peak_gib: float


def backbone(checkpointing: bool = False, drop_path: float = 0.2) -> SwinTransformer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return SwinTransformer(SwinConfig(drop_path=drop_path), checkpointing).train()


def step(model: nn.Module, images: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        outputs = model(images)
    loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
    loss.backward()
    return loss.detach()


def measure(run: Callable[[], Tensor], repeats: int) -> Cost:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() - before
    return Cost(statistics.median(times), min(times), max(times), peak / 2**30)


def gradients(choice: str, images: Tensor, dtype: torch.dtype) -> Tensor:
    model = backbone(drop_path=0.0)
    with backend.forced(choice):
        step(model, images, dtype)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def disagreement(images: Tensor, dtype: torch.dtype) -> float:
    """Relative difference (L2) of all gradients between the kernels and plain torch."""
    ours, reference = (gradients(choice, images, dtype) for choice in ("triton", "torch"))
    return float((ours - reference).norm() / reference.norm())


def cost_of(images: Tensor, dtype: torch.dtype, repeats: int, choice: str, how: Sequence[str]) -> Cost:
    model = nn.ModuleDict({"backbone": backbone("recomputed" in how)})
    if "compiled" in how:
        compile_parts(model, ["backbone"], print)
    if "recorded" in how:
        record_parts(model, ["backbone"], print)
    with backend.forced(choice):
        return measure(lambda: step(model["backbone"], images, dtype), repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="also through torch.compile, which takes a minute")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    images = torch.randn(options.images, 3, *IMAGE, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    difference = disagreement(images[:2], dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.images} images, {options.dtype}")
    print(f"gradients of Triton against torch: {difference:.1e}")
    if not difference < TOLERANCE[dtype]:
        return 1
    variants = [(), ("recorded",), ("recomputed",), ("recomputed", "recorded")]
    variants += [("compiled",), ("compiled", "recorded")] if options.compile else []
    costs = {}
    for choice, how in [*(("triton", how) for how in variants), ("torch", ()), ("torch", ("recorded",))]:
        costs[choice, how] = cost = cost_of(images, dtype, options.repeats, choice, how)
        spread = f"({cost.least_ms:.2f} to {cost.most_ms:.2f})"
        print(f"{', '.join((choice, *how)):30s} {cost.median_ms:8.2f} ms {spread:20s} {cost.peak_gib:6.2f} GiB")
    judged = dtype == torch.float16 and options.images == 24
    return 1 if judged and costs["triton", ("recorded",)].median_ms > LIMIT_MS else 0


if __name__ == "__main__":
    sys.exit(main())
