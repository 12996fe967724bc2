"""Features of the depth image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bevctl.ops.affine_conv import affine_relu_conv
from bevctl.ops.backend import use_triton
from bevctl.ops.bias import BiasedConv2d


def conv_norm_act(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Convolution with bias and half the kernel as padding, BatchNorm, ReLU."""
    conv = BiasedConv2d(in_channels, out_channels, kernel, stride, kernel // 2)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]


class DepthTransform(nn.Sequential):
    """Depth image to features at an eighth of its size; entries 0 to 8: three times convolution, BatchNorm, ReLU.

    The first convolution has one channel and a 1 × 1 kernel. With its BatchNorm it is an affine map of the depth, whose
    statistics follow from those of the depth, so that in Triton its 8 full-size channels are never made.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(
            *conv_norm_act(1, 8, 1),
            *conv_norm_act(8, 32, 5, stride=4),
            *conv_norm_act(32, channels, 5, stride=2),
        )

    def forward(self, depth: Tensor) -> Tensor:
        """(N, 1, H, W) m, 0 where unknown → (N, C, H / 8, W / 8)."""
        if not self._joins_first_layers(depth):
            # One channel fits both memory formats; a new last axis makes it channels-last, which convolutions keep.
            features: Tensor = super().forward(depth[:, 0, ..., None].permute(0, 3, 1, 2))
            return features
        second = self[3]
        assert isinstance(second, nn.Conv2d)
        assert second.bias is not None
        features = affine_relu_conv(depth[:, 0], *self._affine(depth), second.weight, second.bias, second.stride[0])
        for layer in list(self)[4:]:
            features = layer(features)
        return features

    def _joins_first_layers(self, depth: Tensor) -> bool:
        """Not with statistics of several ranks, of all batches alike, or of none, and not while compiled."""
        norm = self[1]
        plain = type(norm) is nn.BatchNorm2d and norm.track_running_stats and norm.momentum is not None
        known = depth.dtype == torch.float32 and not depth.requires_grad
        return plain and known and not torch.compiler.is_compiling() and use_triton(depth)

    def _affine(self, depth: Tensor) -> tuple[Tensor, Tensor]:
        """(8,) scale and (8,) shift of first convolution and BatchNorm together; updates the running statistics."""
        conv, norm = self[0], self[1]
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        mean, variance, momentum = norm.running_mean, norm.running_var, norm.momentum
        assert conv.bias is not None
        assert mean is not None
        assert variance is not None
        assert momentum is not None
        weight = conv.weight.flatten()
        if norm.training:
            running_mean, running_variance = mean, variance
            of_depth, around = torch.var_mean(depth, correction=0)
            mean, variance = weight * around + conv.bias, weight.square() * of_depth
            with torch.no_grad():
                running_mean.lerp_(mean, momentum)
                running_variance.lerp_(variance * (depth.numel() / max(1, depth.numel() - 1)), momentum)
                if norm.num_batches_tracked is not None:
                    norm.num_batches_tracked += 1
        scale = norm.weight * torch.rsqrt(variance + norm.eps)
        return weight * scale, norm.bias + (conv.bias - mean) * scale
