"""Time and memory of PETRv2's image backbone on a GPU: python -m tests.bench.bench_vovnet [--images 48].

VoVNet-99 with fixed norms on 320 × 800 images, forward and backward in FP16 (or --dtype): the kernels and plain torch,
as they are, recorded as CUDA graphs and recomputed; 48 images are four samples of two moments. Then two choices inside
the kernels' path: the weight gradient of each stage's last convolution as one product for each part or of the
concatenated map, and the first convolution on three channels or on eight, five of them zero. Medians with least and
most, and peak memory above what is there before, without what lies in graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from bevctl.config.schema import VoVNetConfig
from bevctl.engine.cuda_graphs import record_parts
from bevctl.models.vovnet import VoVNet
from bevctl.ops import backend
from bevctl.ops.aggregation import shifted_relu_conv
from tests.bench.bench_swin import Cost, measure, step
from tests.models.rig import settle_statistics

IMAGE = (320, 800)
CONFIG = VoVNetConfig()


def backbone(checkpointing: bool = False) -> VoVNet:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = VoVNet(CONFIG, 2, checkpointing, norm_eval=True).train()
    settle_statistics(model, pictures(2))
    return model


def pictures(count: int, channels: int = 3) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(count, channels, *IMAGE, device="cuda", generator=generator)


def cost_of(images: Tensor, dtype: torch.dtype, repeats: int, choice: str, how: Sequence[str]) -> Cost:
    model = nn.ModuleDict({"backbone": backbone("recomputed" in how)})
    if "recorded" in how:
        record_parts(model, ["backbone"], print)
    with backend.forced(choice):
        return measure(lambda: step(model["backbone"], images, dtype), repeats)


def weight_gradients(images: int, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]]:
    """For each stage the two ways, on random maps of its size."""
    ways: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}
    for stage, (inner, channels) in enumerate(zip(CONFIG.inner, CONFIG.channels, strict=True)):
        rows = images * (IMAGE[0] >> stage + 2) * (IMAGE[1] >> stage + 2)
        parts = [torch.randn(rows, width, device="cuda", dtype=dtype) for width in (channels, *[inner] * CONFIG.layers)]
        grad = torch.randn(rows, channels, device="cuda", dtype=dtype)

        def piecewise(grad: Tensor = grad, parts: list[Tensor] = parts) -> Tensor:
            return torch.cat([grad.T @ part for part in parts], dim=1)

        def together(grad: Tensor = grad, parts: list[Tensor] = parts) -> Tensor:
            return grad.T @ torch.cat(parts, dim=1)

        ways[f"stage {stage + 2}"] = (piecewise, together)
    return ways


def first_convolution(images: int, channels: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    x = pictures(images, channels).to(dtype)
    weight = torch.randn(CONFIG.stem[0], channels, 3, 3, device="cuda", dtype=dtype, requires_grad=True)
    shift = torch.zeros(CONFIG.stem[0], device="cuda", requires_grad=True)

    def run() -> Tensor:
        out = shifted_relu_conv(x, weight, shift, 2)
        torch.autograd.grad(out, (weight, shift), out.detach())
        return out

    return run


def show(what: str, cost: Cost) -> None:
    spread = f"({cost.least_ms:.2f} to {cost.most_ms:.2f})"
    print(f"{what:44s} {cost.median_ms:8.2f} ms {spread:20s} {cost.peak_gib:6.2f} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float16")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.images} images, {options.dtype}")
    images = pictures(options.images)
    variants = [("triton", how) for how in ((), ("recorded",), ("recomputed",), ("recomputed", "recorded"))]
    for choice, how in (*variants, ("torch", ()), ("torch", ("recorded",))):
        show(", ".join((choice, *how)), cost_of(images, dtype, options.repeats, choice, how))
    for name, (piecewise, together) in weight_gradients(options.images, dtype).items():
        show(f"weight gradient of {name}, part by part", measure(piecewise, options.repeats))
        show(f"weight gradient of {name}, concatenated", measure(together, options.repeats))
    for channels in (3, 8):
        run = first_convolution(options.images, channels, dtype)
        show(f"first convolution, {channels} channels", measure(run, options.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main())
