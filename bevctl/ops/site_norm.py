"""BatchNorm over the sites of a sparse tensor, with a shortcut and the ReLU in the same pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from bevctl.ops import site_norm_torch
from bevctl.ops.backend import use_triton


class SiteNorm(nn.BatchNorm1d):
    """BatchNorm over active sites, eps 1e-3 and momentum 0.01.

    Fewer than two sites have no variance: the running statistics stand in, also in training. `synchronized` shares
    the statistics between all ranks; a rank without sites still takes part.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3, momentum=0.01)
        self.synchronized = False

    def forward(
        self,
        features: Tensor,
        shortcut: Tensor | None = None,
        relu: bool = False,
        count: Tensor | None = None,
    ) -> Tensor:
        """norm(features) (+ shortcut), through a ReLU if asked; all (M, C).

        `count` (1,) int32, on the device, is the number of rows that are sites. The others, padding at the end, must
        get no gradient; what they hold afterwards means nothing.

        Raises:
            ValueError: shapes that do not belong together.
        """
        if features.dim() != 2 or features.shape[1] != self.num_features:
            raise ValueError(f"features must be (M, {self.num_features}), got {tuple(features.shape)}")
        if shortcut is not None and shortcut.shape != features.shape:
            raise ValueError(f"shortcut must be {tuple(features.shape)}, got {tuple(shortcut.shape)}")
        shared = self.synchronized and self.training and distributed.is_initialized()
        ops = _passes(features)
        if not shared and count is None and ops is site_norm_torch:
            return self._plain(features, shortcut, relu)
        features = features.contiguous()
        statistics = self._statistics(features.detach(), count, ops, shared)
        out: Tensor = _Normalise.apply(features, shortcut, self.weight, self.bias, statistics, relu, ops, shared)
        return out

    def _plain(self, features: Tensor, shortcut: Tensor | None, relu: bool) -> Tensor:
        """torch's own operations."""
        if len(features) > 1 or not self.training:
            out = super().forward(features)
        else:
            out = functional.batch_norm(
                features, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
            )
        out = out if shortcut is None else out + shortcut
        return functional.relu(out) if relu else out

    def _statistics(self, features: Tensor, count: Tensor | None, ops: ModuleType, shared: bool) -> Tensor:
        """(3, C) mean, inverse deviation, and inverse count of the sites they come from or 0."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        if not self.training:
            deviation = torch.rsqrt(self.running_var + self.eps)
            return torch.stack([self.running_mean, deviation, torch.zeros_like(deviation)])
        moments = ops.moments(features, count)
        if shared:
            moments = _gathered(ops.merge(moments))
        buffers = self.running_mean, self.running_var, self.num_batches_tracked
        statistics: Tensor = ops.finish(moments, *buffers, self.momentum, self.eps)
        return statistics


def share_statistics(model: nn.Module) -> None:
    """Makes every BatchNorm of `model` use the statistics of all ranks: `SiteNorm` itself, others as SyncBatchNorm."""
    for module in list(model.modules()):
        if isinstance(module, SiteNorm):
            module.synchronized = True
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm) and not isinstance(child, SiteNorm):
                module.register_module(name, nn.SyncBatchNorm.convert_sync_batchnorm(child))


def _passes(features: Tensor) -> ModuleType:
    """The module whose functions run the passes over features."""
    if len(features) and features.dtype != torch.float64 and use_triton(features):
        from bevctl.ops.kernels import site_norm

        return site_norm
    return site_norm_torch


def _gathered(tensor: Tensor) -> Tensor:
    """(ranks, ...) tensors of all ranks."""
    parts = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, tensor)
    return torch.stack(parts)


class _Normalise(torch.autograd.Function):
    """(M, C) normalised features · weight + bias (+ shortcut), through the ReLU if asked.

    Statistics that come from a batch (inverse count > 0) take part in the gradient, over all ranks if `shared`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        shortcut: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        statistics: Tensor,
        relu: bool,
        ops: ModuleType,
        shared: bool,
    ) -> Tensor:
        shortcut = None if shortcut is None else shortcut.contiguous()
        out: Tensor = ops.apply(features, statistics, weight, bias, shortcut, relu)
        kept = out if relu and shortcut is not None else None
        ctx.save_for_backward(features, kept, weight, bias, statistics)
        ctx.shortcut, ctx.relu, ctx.ops, ctx.shared = shortcut is not None, relu, ops, shared
        ctx.unpacked = None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, out, weight, bias, statistics = _kept(ctx)
        ctx.unpacked = None
        grad = grad.contiguous()
        own = ctx.ops.sums(grad, features, out, statistics, weight, bias, ctx.relu)
        total = own
        if ctx.shared:
            total = own.clone()
            distributed.all_reduce(total)
        feature_grad, shortcut_grad = ctx.ops.gradients(
            grad, features, out, statistics, weight, bias, total, ctx.shortcut, ctx.relu
        )
        return feature_grad, shortcut_grad, own[1].to(weight.dtype), own[0].to(weight.dtype), None, None, None, None


def norm_of(tensor: Tensor) -> Any:
    """The node of the graph that made `tensor`, if it is a norm without a shortcut, else None."""
    node: Any = tensor.grad_fn
    return node if getattr(node, "_forward_cls", None) is _Normalise and not node.shortcut else None


def made_again(norm: Any) -> Tensor:
    """The result of a norm found by `norm_of`, before its backward pass: cheaper to make again than to keep."""
    features, _, weight, bias, statistics = _kept(norm)
    result: Tensor = norm.ops.apply(features, statistics, weight, bias, None, norm.relu)
    return result


def _kept(norm: Any) -> tuple[Any, ...]:
    """The tensors that a norm kept; under activation checkpointing torch hands them out only once."""
    if norm.unpacked is None:
        norm.unpacked = norm.saved_tensors
    kept: tuple[Any, ...] = norm.unpacked
    return kept
