"""Small models whose step has one fault that keeps half precision from being faster, and one that has none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.measure.step_profile import Workload

PARTS = ("backbone", "middle", "head")


class Net(nn.Module):
    """Images (B, 3, S, S) through convolutions, the part with the fault, and a head, to a loss."""

    def __init__(self, middle: nn.Module, width: int, depth: int = 2) -> None:
        super().__init__()
        layers = [nn.Conv2d(8, width, 3, padding=1)]
        layers += [nn.Conv2d(width, width, 3, padding=1) for _ in range(depth - 1)]
        self.backbone = nn.Sequential(*layers)
        self.middle = middle
        self.head = nn.Conv2d(width, 8, 3, padding=1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {"loss/object/heatmap": self.head(self.middle(self.backbone(images))).float().square().mean()}


class Serial(nn.Module):
    """Index arithmetic that takes long and has no product in it, as a serial voxelisation."""

    points: Tensor

    def __init__(self, points: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.register_buffer("points", torch.randint(0, 1000, (points,)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cells = self.points
        for _ in range(self.rounds):
            cells = torch.sort(torch.remainder(cells * 31 + 7, 1009)).values
        return x + cells[0].to(x.dtype)


class _OutOfReach(torch.autograd.Function):
    """A product through an out= operation, which autocast leaves alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return torch.mm(rows, weight, out=torch.empty(len(rows), weight.shape[1], device=rows.device))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight.T, rows.T @ gradient


class SparseInSingle(nn.Module):
    """A sparse convolution whose gathered rows and weights stay FP32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / width for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).float()
        total = torch.stack([_OutOfReach.apply(rows, weight) for weight in self.weights]).sum(dim=0)
        return x + total.reshape(x.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2).to(x.dtype)


class LiftInSingle(nn.Module):
    """An outer product of depths and features that is made in FP32 outside of autocast."""

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            depths = x[:, :1].float().expand(-1, self.bins, -1, -1) / self.bins
            outer = depths[:, :, None] * x.float()[:, None]
            return x + outer.sum(dim=1).to(x.dtype)


class Assignment(nn.Module):
    """Targets that are assigned on the host, one number at a time."""

    def __init__(self, objects: int) -> None:
        super().__init__()
        self.objects = objects

    def forward(self, x: Tensor) -> Tensor:
        best = 0.0
        for number in range(self.objects):
            best = max(best, x.detach()[0, 0, 0, number % x.shape[3]].float().item())
            time.sleep(2e-4)  # what a matching on the host takes
        return x + best * 0


class Launches(nn.Module):
    """Thousands of tiny operations."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.rounds = count

    def forward(self, x: Tensor) -> Tensor:
        small = x.detach()[0, 0, 0]
        for _ in range(self.rounds):
            small = small * 0.999
        return x + small[0] * 0


def workload(
    net: Net, batch: int, size: int, device: torch.device, dtype: torch.dtype, load: Callable[[], object] | None = None
) -> Workload:
    """A step of `net` on random images; FP32 without autocast where `dtype` says so."""
    torch.manual_seed(0)
    net.to(device)
    images = torch.randn(batch, 8, size, size, device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    half = dtype is not torch.float32

    def autocast() -> AbstractContextManager[Any]:
        return torch.autocast(device.type, dtype=dtype) if half else nullcontext()

    def forward() -> dict[str, Tensor]:
        with autocast():
            losses: dict[str, Tensor] = net(images)
        return losses

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward()["loss/object/heatmap"].backward()
        optimizer.step()

    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return Workload(net, PARTS, device, step, forward, name, batch, load)


def odd(width: int, depth: int) -> Net:
    """Widths that tensor cores cannot take as they are."""
    return Net(nn.Identity(), width, depth)


def with_printing_hooks(net: Net) -> Net:
    """Hooks that read a number of every output, as for a log."""

    def read(_: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            for number in range(4):
                float(output.detach()[0, 0, 0, number].float())
                time.sleep(5e-5)  # what the log takes

    for module in net.middle.modules():
        module.register_forward_hook(read)
    return net


class Chain(nn.Sequential):
    """Small convolutions one after the other."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__(*(nn.Conv2d(width, width, 1) for _ in range(count)))


class FunctionalOff(nn.Module):
    """Convolutions inside a block that switches autocast off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, 3, 3) / width)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = F.conv2d(x.float(), self.weight, padding=1)
            return out
