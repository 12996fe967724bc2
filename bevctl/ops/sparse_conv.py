"""Sparse 3D convolution by gather, matrix product and scatter; the grid itself is never made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from bevctl.ops.rulebook import RuleBook, Triple, output_shape, ravel, strided_rules, submanifold_rules


@dataclass(frozen=True)
class SparseTensor:
    """Features at M active sites of a grid; `SparseTensor.build` puts the rows in order."""

    features: Tensor
    """(M, C)."""
    coords: Tensor
    """(M, 4) int64 (b, x, y, z), unique, ascending."""
    shape: Triple
    """Cells along x, y, z."""
    batch: int
    """Samples; some may have no site."""
    rules: dict[Triple, RuleBook] = field(default_factory=dict, repr=False, compare=False)
    """Submanifold rules of these sites by kernel, shared by every tensor made with `with_features`."""

    @staticmethod
    def build(features: Tensor, coords: Tensor, shape: Triple, batch: int) -> SparseTensor:
        """A sparse tensor of (M, C) features at (M, 4) unique integer sites (b, x, y, z) in any order.

        Raises:
            ValueError: shapes that do not belong together.
        """
        if features.dim() != 2 or coords.shape != (len(features), 4):
            raise ValueError(
                f"features must be (M, C) and coords (M, 4), got {tuple(features.shape)} and {tuple(coords.shape)}"
            )
        order = torch.argsort(ravel(coords.long(), shape))
        return SparseTensor(features[order], coords.long()[order], shape, batch)

    def with_features(self, features: Tensor) -> SparseTensor:
        """The same sites with other features."""
        return dataclasses.replace(self, features=features)

    def submanifold_rules(self, kernel: Triple) -> RuleBook:
        """Rules of a submanifold convolution on these sites, made once a kernel."""
        if kernel not in self.rules:
            self.rules[kernel] = submanifold_rules(self.coords, self.shape, kernel)
        return self.rules[kernel]

    def dense(self) -> Tensor:
        """(B, C, X, Y, Z) with zeros elsewhere."""
        x, y, z = self.shape
        grid = self.features.new_zeros(self.batch * x * y * z, self.features.shape[1])
        grid = grid.index_copy(0, ravel(self.coords, self.shape), self.features)
        return grid.view(self.batch, x, y, z, -1).permute(0, 4, 1, 2, 3)


def sparse_conv(features: Tensor, weight: Tensor, rules: RuleBook) -> Tensor:
    """Convolve (M, Cin) features with a (kx, ky, kz, Cin, Cout) kernel; (M', Cout) in the dtype of the products.

    The products of one offset run in the autocast dtype (tensor cores), or in that of `features` without autocast.
    They are added up over the offsets in at least float32, in a fixed order: half precision would lose digits in each
    of up to 27 additions. Results repeat bit by bit. Only features and weight are kept for the backward pass, which
    gathers again.

    Raises:
        ValueError: a kernel that does not fit the features or the rules.
    """
    if weight.dim() != 5 or features.dim() != 2 or features.shape[1] != weight.shape[3]:
        raise ValueError(
            f"weight must be (kx, ky, kz, {features.shape[-1]}, Cout) for features {tuple(features.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    kernels = weight.flatten(0, 2)
    if (len(kernels), len(features)) != (len(rules.table), rules.inputs):
        raise ValueError(
            f"the rules are for {len(rules.table)} offsets and {rules.inputs} sites, "
            f"got weight {tuple(weight.shape)} and features {tuple(features.shape)}"
        )
    device = features.device.type
    if torch.is_autocast_enabled(device):
        features = features.to(torch.get_autocast_dtype(device))
    out: Tensor = _GatherProductSum.apply(features, kernels, rules)
    return out


class _GatherProductSum(torch.autograd.Function):
    """out[target] = Σ features[source] @ kernels[offset], over the pairs of all offsets."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, kernels: Tensor, rules: RuleBook) -> Tensor:
        ctx.save_for_backward(features, kernels)
        ctx.rules = rules
        return _convolve(features, kernels.to(features.dtype), rules)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        features, kernels = ctx.saved_tensors
        rules: RuleBook = ctx.rules
        feature_grad = kernel_grad = None
        if ctx.needs_input_grad[0]:
            back = kernels.to(grad.dtype).transpose(1, 2)
            if rules.mirrored:
                feature_grad = _convolve(grad, back.flip(0), rules)
            else:
                feature_grad = _convolve(grad, back, rules.transposed())
        if ctx.needs_input_grad[1]:
            kernel_grad = _kernel_gradient(features, grad, rules).to(kernels.dtype)
        return feature_grad, kernel_grad, None


def _convolve(features: Tensor, kernels: Tensor, rules: RuleBook) -> Tensor:
    """(outputs, Cout) of (inputs, Cin) features and (K, Cin, Cout) kernels, all in one dtype."""
    out = features.new_empty(rules.outputs, kernels.shape[2])
    for block in rules.blocks(_block_rows(features, kernels.shape[2])):
        gathered = features.index_select(0, block.sources)
        products = features.new_empty(len(gathered), kernels.shape[2])
        pieces = zip(gathered.split(block.counts), products.split(block.counts), kernels, strict=True)
        for piece, product, kernel in pieces:
            if len(piece):
                torch.mm(piece, kernel, out=product)
        # A bag is the sum of some rows, accumulated in float32 in the order given: several times faster than
        # index_add on a CPU, and free of atomics on a GPU.
        out[block.rows] = functional.embedding_bag(block.order, products, block.starts, mode="sum")
    return out


def _kernel_gradient(features: Tensor, grad: Tensor, rules: RuleBook) -> Tensor:
    """(K, Cin, Cout) gradient in at least float32."""
    accumulated = torch.promote_types(features.dtype, torch.float32)
    total = features.new_zeros(len(rules.table), features.shape[1], grad.shape[1], dtype=accumulated)
    for block in rules.blocks(_block_rows(features, grad.shape[1])):
        left = features.index_select(0, block.sources).split(block.counts)
        right = grad.index_select(0, block.targets).split(block.counts)
        for offset, count in enumerate(block.counts):
            if count:
                total[offset] += left[offset].T @ right[offset]
    return total


def _block_rows(features: Tensor, out_channels: int) -> int:
    """Output rows whose pairs are worked on at once.

    On a CPU the pairs should stay in cache (and new memory is dear); on a GPU each product should be large.
    """
    elements = 2**25 if features.is_cuda else 2**18
    return max(1, elements // max(features.shape[1], out_channels))


class SubMConv3d(nn.Module):
    """Submanifold convolution without bias: output at the input's sites only.

    The weight is (kx, ky, kz, Cin, Cout), drawn from U(±1/sqrt(kx·ky·kz·Cin)) as for torch's dense convolutions.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel: Triple = (3, 3, 3)) -> None:
        super().__init__()
        if any(size % 2 == 0 for size in kernel):
            raise ValueError(f"a submanifold kernel must be odd, got {kernel}")
        self.kernel = kernel
        self.weight = _kernel_parameter(kernel, in_channels, out_channels)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return x.with_features(sparse_conv(x.features, self.weight, x.submanifold_rules(self.kernel)))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[3]}, {self.weight.shape[4]}, kernel={self.kernel}"


class SparseConv3d(nn.Module):
    """Strided sparse convolution without bias: output wherever the window holds an active site.

    Weight layout and initialisation are those of `SubMConv3d`.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Triple, stride: Triple, padding: Triple = (0, 0, 0)
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.padding = kernel, stride, padding
        self.weight = _kernel_parameter(kernel, in_channels, out_channels)

    def forward(self, x: SparseTensor) -> SparseTensor:
        coords, rules = strided_rules(x.coords, x.shape, self.kernel, self.stride, self.padding)
        shape = output_shape(x.shape, self.kernel, self.stride, self.padding)
        return SparseTensor(sparse_conv(x.features, self.weight, rules), coords, shape, x.batch)

    def extra_repr(self) -> str:
        channels = f"{self.weight.shape[3]}, {self.weight.shape[4]}"
        return f"{channels}, kernel={self.kernel}, stride={self.stride}, padding={self.padding}"


def _kernel_parameter(kernel: Triple, in_channels: int, out_channels: int) -> nn.Parameter:
    bound = 1 / math.sqrt(math.prod(kernel) * in_channels)
    return nn.Parameter(torch.empty(*kernel, in_channels, out_channels).uniform_(-bound, bound))
