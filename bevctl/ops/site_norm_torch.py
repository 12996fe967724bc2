"""What `bevctl.ops.kernels.site_norm` computes, in plain torch: its specification, and its stand-in where ranks share
statistics without Triton. Sums are float32, or float64 for float64 features."""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def moments(features: Tensor, number: Tensor | None = None) -> Tensor:
    """(1, 3, C) count, mean and sum of squared distances to the mean; zeros for no rows.

    `number` is how many rows count, (1,) int32 on the device.
    """
    row = torch.arange(len(features), device=features.device)[:, None]
    counts = row < (len(features) if number is None else number)
    values = _wide(features).where(counts, 0)
    count = counts.sum(0).to(values.dtype).expand(features.shape[1])
    mean = values.sum(0) / count.clamp(min=1)
    return torch.stack([count, mean, (values - mean).where(counts, 0).square().sum(0)])[None]


def merge(moments: Tensor) -> Tensor:
    """(3, C) moments of all (sets, 3, C) together."""
    count, mean, square = moments.unbind(1)
    total = count.sum(0)
    middle = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, middle, (square + count * (mean - middle).square()).sum(0)])


def finish(
    moments: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor | None, momentum: float, eps: float
) -> Tensor:
    """(3, C) mean, inverse deviation and inverse count; updates the running statistics, which stand in below two.

    `batches` is the number of batches that went in, and counts this one if it does.
    """
    count, mean, square = merge(moments)
    enough = count > 1
    mean = torch.where(enough, mean, running_mean)
    unbiased = torch.where(enough, square / (count - 1).clamp(min=1), running_var)
    variance = torch.where(enough, square / count.clamp(min=1), running_var)
    if batches is not None:
        batches += enough.any()
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return torch.stack([mean, torch.rsqrt(variance + eps), torch.where(enough, 1 / count.clamp(min=1), 0)])


def _normalised(features: Tensor, statistics: Tensor) -> Tensor:
    return (_wide(features) - statistics[0]) * statistics[1]


def apply(
    features: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, relu: bool
) -> Tensor:
    """Normalised features · weight + bias (+ shortcut), through the ReLU if asked."""
    out = _normalised(features, statistics) * weight + bias
    out = out if shortcut is None else out + shortcut
    return (out.relu() if relu else out).to(features.dtype)


def _passed(
    grad: Tensor, features: Tensor, out: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> Tensor:
    """Gradient before the ReLU; without a shortcut, what went into the ReLU is made again."""
    if not relu:
        return _wide(grad)
    return _wide(grad).where((_normalised(features, statistics) * weight + bias if out is None else out) > 0, 0)


def sums(
    grad: Tensor, features: Tensor, out: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> Tensor:
    """(2, C) sums of the gradient before the ReLU, plain and weighted by normalised features.

    `out` is the result where there was a shortcut.
    """
    passed = _passed(grad, features, out, statistics, weight, bias, relu)
    return torch.stack([passed.sum(0), (passed * _normalised(features, statistics)).sum(0)])


def gradients(
    grad: Tensor, features: Tensor, out: Tensor | None, statistics: Tensor, weight: Tensor, bias: Tensor,
    sums: Tensor, shortcut: bool, relu: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gradients of features and shortcut, given `sums` over the rows that the statistics stand for."""
    passed = _passed(grad, features, out, statistics, weight, bias, relu)
    plain, weighted = sums * statistics[2]
    feature_grad = (passed - plain - weighted * _normalised(features, statistics)) * weight * statistics[1]
    return feature_grad.to(features.dtype), passed.to(grad.dtype) if shortcut else None
