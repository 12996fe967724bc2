"""Sparse 3D convolution by gather and matrix product over a rule-book; the grid itself is never made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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
    """Convolve (M, Cin) features with a (kx, ky, kz, Cin, Cout) kernel; (M', Cout).

    Each output row gathers its neighbours, zeros where there is none, and one matrix product sums over neighbours and
    channels. It runs in the autocast dtype (tensor cores), or without autocast in the wider one of features and
    weight, and adds up in float32 inside. Sums have a fixed order, so results repeat bit by bit. Only features and
    weight are kept for the backward pass, which gathers again.

    Raises:
        ValueError: a kernel that does not fit the features or the rules.
    """
    if weight.dim() != 5 or features.dim() != 2 or features.shape[1] != weight.shape[3]:
        raise ValueError(
            f"weight must be (kx, ky, kz, {features.shape[-1]}, Cout) for features {tuple(features.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    kernels = weight.flatten(0, 2)
    if (len(kernels), len(features)) != (rules.table.shape[1], rules.inputs):
        raise ValueError(
            f"the rules are for {rules.table.shape[1]} offsets and {rules.inputs} sites, "
            f"got weight {tuple(weight.shape)} and features {tuple(features.shape)}"
        )
    device = features.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else torch.promote_types(features.dtype, weight.dtype)
    out: Tensor = _GatherProduct.apply(features.to(dtype), kernels, rules)
    return out


class _GatherProduct(torch.autograd.Function):
    """out[i] = Σ over offsets of features[table[i, offset]] @ kernels[offset]."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, kernels: Tensor, rules: RuleBook) -> Tensor:
        ctx.save_for_backward(features, kernels)
        ctx.rules = rules
        return _convolve(features, kernels.to(features.dtype), rules.table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        features, kernels = ctx.saved_tensors
        rules: RuleBook = ctx.rules
        feature_grad = kernel_grad = None
        if ctx.needs_input_grad[0]:
            back = kernels.to(grad.dtype).transpose(1, 2)
            # Mirrored rules are their own transpose, with the offsets in reverse.
            feature_grad = _convolve(grad, back.flip(0), rules.table) if rules.mirrored else _spread(grad, back, rules)
        if ctx.needs_input_grad[1]:
            kernel_grad = _kernel_gradient(features, grad, rules.table).reshape(kernels.shape).to(kernels.dtype)
        return feature_grad, kernel_grad, None


def _convolve(features: Tensor, kernels: Tensor, table: Tensor) -> Tensor:
    """(outputs, Cout) of (inputs, Cin) features and (K, Cin, Cout) kernels of one dtype."""
    out = features.new_empty(len(table), kernels.shape[2])
    stacked = kernels.flatten(0, 1)
    for rows, gathered in _gathered(features, table):
        torch.mm(gathered, stacked, out=out[rows])
    return out


def _spread(grad: Tensor, kernels: Tensor, rules: RuleBook) -> Tensor:
    """(inputs, Cin) sums of grad[i] @ kernels[offset] at row table[i, offset], accumulated in at least float32.

    Offset by offset, since one offset adds to a row at most once: the order of the sums is fixed.
    """
    table = rules.table.T
    offsets, rows = (table < rules.inputs).nonzero(as_tuple=True)
    sources = table[offsets, rows].long()
    counts = torch.bincount(offsets, minlength=len(table)).tolist()
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(rules.inputs, kernels.shape[2], dtype=wide)
    for row, source, kernel in zip(rows.split(counts), sources.split(counts), kernels, strict=True):
        total.index_add_(0, source, (grad.index_select(0, row) @ kernel).to(wide))
    return total.to(grad.dtype)


def _kernel_gradient(features: Tensor, grad: Tensor, table: Tensor) -> Tensor:
    """(K · Cin, Cout) gradient, added up over pieces in at least float32."""
    wide = torch.promote_types(features.dtype, torch.float32)
    total = features.new_zeros(grad.shape[1], table.shape[1] * features.shape[1], dtype=wide)
    for rows, gathered in _gathered(features, table):
        total += grad[rows].T @ gathered
    return total.T


def _gathered(features: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of output rows, each with the (rows, K · Cin) features that its rows meet."""
    width = table.shape[1] * features.shape[1]
    step = max(1, _piece_elements(features) // width)
    padded = torch.cat([features, features.new_zeros(1, features.shape[1])])
    for first in range(0, len(table), step):
        rows = slice(first, first + step)
        yield rows, padded.index_select(0, table[rows].flatten()).view(-1, width)


def _piece_elements(features: Tensor) -> int:
    """Gathered elements at any one time: few enough for a CPU's cache, enough to keep a GPU busy."""
    return 2**26 if features.is_cuda else 2**19


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
