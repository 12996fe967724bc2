"""Small blocks that several parts share."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from bevctl.ops.layer_norm import layer_norm
from bevctl.ops.linear import linear


class ConvBlock(nn.Module):
    """Convolution over the last `dims` axes without bias, BatchNorm, ReLU; entries `conv` and `bn`."""

    def __init__(self, channels_in: int, channels: int, kernel: int, dims: int = 2, stride: int = 1) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv2d, nn.BatchNorm2d)
        self.conv = conv(channels_in, channels, kernel, stride, padding=kernel // 2, bias=False)
        self.bn = norm(channels)
        init_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, …) → (B, C, …) of the same size divided by the stride, rounded up."""
        return F.relu(self.bn(self.conv(x)))


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis, computed in float32, whose result has the autocast dtype.

    A `wide` one returns float32, as torch's does under autocast.
    """

    def __init__(self, channels: int, wide: bool = False) -> None:
        super().__init__(channels)
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → the same shape."""
        dtype = torch.promote_types(x.dtype, torch.float32) if self.wide else autocast_dtype(x)
        return layer_norm(x, self.weight, self.bias, self.eps, dtype)

    def before(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`layer` of the normalised `x`; where `layer` keeps that for its backward pass, it is computed again."""
        normalised: Tensor = self(x)
        if torch.compiler.is_compiling() or not x.is_cuda or not is_plain(self):
            return layer(normalised)
        dtype = normalised.dtype
        with recomputed_when_saved(normalised, lambda: layer_norm(x, self.weight, self.bias, self.eps, dtype)):
            return layer(normalised)


class Linear(nn.Linear):
    """Linear layer with a bias, for maps of many positions."""

    def forward(self, x: Tensor) -> Tensor:
        """(…, C_in) → (…, C)."""
        return linear(x, self.weight, self.bias, autocast_dtype(x))


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The number format in which autocast multiplies `x`; its own without autocast."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def channels_last(x: Tensor) -> Tensor:
    """`x` (B, C, H, W) with its channels side by side in memory where it is on a GPU, as tensor cores read them."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x


def init_convolutions(module: nn.Module) -> None:
    """Kaiming-normal weights (fan out, ReLU) in the dense convolutions of `module`, all of them followed by a norm."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def keep_statistics(module: nn.Module) -> None:
    """Puts the BatchNorms of `module` into evaluation mode; their factors and shifts go on learning."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.eval()


def recompute(module: nn.Module, *args: Any, enabled: bool = True, random: bool = True) -> Any:
    """`module(*args)`, whose activations are dropped and computed again in the backward pass when `enabled`.

    Gradients, random draws and BatchNorm's running statistics are those of an ordinary call. A module that is not
    `random` needs no random state put back, which a CUDA graph could not hold.
    """
    if not enabled or not torch.is_grad_enabled():
        return module(*args)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return _keeping_nothing(), _second_pass(module)

    return checkpoint(module, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=random)


_recomputing = contextvars.ContextVar("recomputing", default=False)
"""Whether a module around this call runs twice, so that nothing inside is kept for long."""


@contextlib.contextmanager
def _keeping_nothing() -> Iterator[None]:
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


@contextlib.contextmanager
def _second_pass(module: nn.Module) -> Iterator[None]:
    """The same batch must not enter BatchNorm's running statistics again."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.training]
    saved = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with _keeping_nothing():
            yield
    finally:
        for norm, (momentum, count) in zip(norms, saved, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def is_plain(*modules: nn.Module) -> bool:
    """Whether calling `modules` does nothing but run their classes' forward: nothing is wrapped around or hooked in."""
    return not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in modules)


@contextlib.contextmanager
def recomputed_when_saved(tensor: Tensor, compute: Callable[[], Tensor]) -> Iterator[None]:
    """Where an operation in the block keeps `tensor` for its backward pass, the backward pass computes it again.

    `compute` is cheap and gives the same values; what it reads is kept anyway. Inside `recompute` this does nothing,
    nor under torch.compile, which decides that by itself.
    """
    if _recomputing.get() or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        yield
        return
    address, size = tensor.data_ptr(), tensor.numel()

    def pack(saved: Tensor) -> Tensor | torch.Size:
        return saved.shape if saved.data_ptr() == address and saved.numel() == size else saved

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        return packed if isinstance(packed, Tensor) else compute().view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
