"""Small blocks that several parts share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


class ConvBlock(nn.Module):
    """Convolution over the last `dims` axes without bias, BatchNorm, ReLU; entries `conv` and `bn`."""

    def __init__(self, channels_in: int, channels: int, kernel: int, dims: int = 2) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)
        self.conv = conv(channels_in, channels, kernel, padding=kernel // 2, bias=False)
        self.bn = norm(channels)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, …) → (B, C, …) of the same size."""
        return F.relu(self.bn(self.conv(x)))


def init_convolutions(module: nn.Module) -> None:
    """Kaiming-normal weights (fan out, ReLU) in the dense convolutions of `module`, all of them followed by a norm."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def recompute(module: nn.Module, *args: Any, enabled: bool = True) -> Any:
    """`module(*args)`, whose activations are dropped and computed again in the backward pass when `enabled`.

    Gradients, random draws and BatchNorm's running statistics are those of an ordinary call.
    """
    if not enabled or not torch.is_grad_enabled():
        return module(*args)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return contextlib.nullcontext(), _frozen_statistics(module)

    return checkpoint(module, *args, use_reentrant=False, context_fn=contexts)


@contextlib.contextmanager
def _frozen_statistics(module: nn.Module) -> Iterator[None]:
    """A second pass over the same batch must not enter BatchNorm's running statistics again."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    saved = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, saved, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
