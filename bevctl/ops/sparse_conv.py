"""Sparse 3D convolution by products over a rule-book; the grid itself is never made.

In Triton, tiles of output rows gather their neighbours straight into matrix units. In torch, pieces of rows are
gathered and multiplied; both keep only features and weight for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bevctl.ops.backend import use_triton
from bevctl.ops.rulebook import MAX_OFFSETS, RuleBook, Triple, ravel
from bevctl.ops.site_norm import made_again, norm_of
from bevctl.ops.sites import Sites, Window

_TILED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NOTHINGS = 1024
"""Rows of zeros that stand for absent neighbours; a single one would be the bottleneck of a GPU's cache."""


class Sparse(Protocol):
    """What layers need of features at the sites of a grid: `SparseTensor`, or the same in another library."""

    @property
    def features(self) -> Tensor:
        """(M, C)."""

    @property
    def count(self) -> Tensor | None:
        """(1,) int32 rows that are sites, on the device; the others are padding. None if all are."""

    def with_features(self, features: Tensor) -> Sparse:
        """The same sites with other features."""

    def submanifold(self, weight: Tensor) -> Sparse:
        """Convolution by a (kx, ky, kz, Cin, Cout) kernel at these sites."""

    def strided(self, weight: Tensor, window: Window) -> Sparse:
        """Strided convolution by a (kx, ky, kz, Cin, Cout) kernel, at every site whose window holds one of these."""

    def dense(self) -> Tensor:
        """(B, C, X, Y, Z) with zeros elsewhere."""


@dataclass(frozen=True)
class SparseTensor:
    """Features at the active sites of a batch of grids; `SparseTensor.build` puts the rows in order."""

    features: Tensor
    """(M, C)."""
    sites: Sites
    """M sites, shared by every tensor made with `with_features`."""

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
        return SparseTensor(features[order], Sites(coords.long()[order], shape, batch))

    @property
    def coords(self) -> Tensor:
        """(M, 4) int64 (b, x, y, z), unique, ascending."""
        return self.sites.coords

    @property
    def shape(self) -> Triple:
        """Cells along x, y, z."""
        return self.sites.shape

    @property
    def count(self) -> Tensor | None:
        """See `Sparse`."""
        return self.sites.count

    def with_features(self, features: Tensor) -> SparseTensor:
        """The same sites with other features."""
        return SparseTensor(features, self.sites)

    def submanifold(self, weight: Tensor) -> SparseTensor:
        """See `Sparse`; rules are shared by all kernels of one size."""
        x, y, z = weight.shape[:3]
        return self.with_features(sparse_conv(self.features, weight, self.sites.submanifold_rules((x, y, z))))

    def strided(self, weight: Tensor, window: Window) -> SparseTensor:
        """See `Sparse`."""
        sites, rules = self.sites.strided_rules(window)
        return SparseTensor(sparse_conv(self.features, weight, rules), sites)

    def dense(self) -> Tensor:
        """(B, C, X, Y, Z) with zeros elsewhere; in memory (B, X, Y, C, Z)."""
        x, y, z = self.sites.shape
        grid: Tensor = _Place.apply(self.features, self.coords, self.sites.batch, self.shape)
        return grid.view(self.sites.batch, x, y, -1, z).permute(0, 3, 1, 2, 4)


class _Place(torch.autograd.Function):
    """(B · X · Y, C, Z) grid of zeros with (M, C) features at their cells; padding goes nowhere."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, coords: Tensor, batch: int, shape: Triple) -> Tensor:
        x, y, z = shape
        # Padding falls into one more column, which is left out.
        columns = torch.where(coords[:, 0] < 0, batch * x * y, ravel(coords, shape) // z)
        ctx.save_for_backward(columns, coords)
        grid = features.new_zeros(batch * x * y + 1, features.shape[1], z)
        grid[columns, :, coords[:, 3].clamp(min=0)] = features
        return grid[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        columns, coords = ctx.saved_tensors
        reached = grad[columns.clamp(max=len(grad) - 1), :, coords[:, 3].clamp(min=0)]
        return reached.masked_fill_((coords[:, 0] < 0)[:, None], 0), None, None, None


def sparse_conv(features: Tensor, weight: Tensor, rules: RuleBook) -> Tensor:
    """Convolve (M, Cin) features with a (kx, ky, kz, Cin, Cout) kernel; (M', Cout).

    Each output row sums over its neighbours and their channels. It runs in the autocast dtype (matrix units), or
    without autocast in the wider one of features and weight, and adds up in float32 inside. Sums have a fixed order,
    so results repeat bit by bit. Only features and weight are kept for the backward pass, which gathers again;
    features that a `SiteNorm` made without a shortcut are made again.

    Raises:
        ValueError: a kernel that does not fit the features or the rules.
    """
    if weight.dim() != 5 or features.dim() != 2 or features.shape[1] != weight.shape[3]:
        raise ValueError(
            f"weight must be (kx, ky, kz, {features.shape[-1]}, Cout) for features {tuple(features.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if (math.prod(weight.shape[:3]), len(features)) != (rules.offsets, rules.inputs):
        raise ValueError(
            f"the rules are for {rules.offsets} offsets and {rules.inputs} sites, "
            f"got weight {tuple(weight.shape)} and features {tuple(features.shape)}"
        )
    dtype = product_dtype(features, weight)
    fits = rules.outputs > 0 and rules.offsets <= MAX_OFFSETS and dtype in _TILED_DTYPES
    tiled = fits and use_triton(features)
    features = features.to(dtype)
    out: Tensor = _RuleProduct.apply(features, weight, rules, tiled, norm_of(features))
    return out


def product_dtype(features: Tensor, weight: Tensor) -> torch.dtype:
    """Number format that a convolution computes in."""
    device = features.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(features.dtype, weight.dtype)


class _RuleProduct(torch.autograd.Function):
    """out[i] = Σ over offsets of features[table[i, offset]] @ weight[offset], in tiles by Triton or in pieces."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, rules: RuleBook, tiled: bool, norm: Any) -> Tensor:
        features = features.contiguous()
        kernels = weight.to(features.dtype).reshape(-1, *weight.shape[3:])
        ctx.norm = norm
        ctx.save_for_backward(features if norm is None else None, kernels)
        ctx.rules, ctx.tiled, ctx.weight = rules, tiled, (weight.shape, weight.dtype)
        return _convolve(features, kernels, rules, tiled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        features, kernels = ctx.saved_tensors
        rules, (shape, dtype) = ctx.rules, ctx.weight
        grad = grad.contiguous()
        feature_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            # Mirrored rules are their own transpose, with the offsets in reverse.
            back = rules if rules.mirrored else rules.transposed()
            feature_grad = _convolve(grad, kernels, back, ctx.tiled, reverse=rules.mirrored, transpose=True)
        if ctx.needs_input_grad[1]:
            features = made_again(ctx.norm) if features is None else features
            weight_grad = _kernel_gradient(features, grad, rules, ctx.tiled).view(shape).to(dtype)
        return feature_grad, weight_grad, None, None, None


def _convolve(
    features: Tensor, kernels: Tensor, rules: RuleBook, tiled: bool, reverse: bool = False, transpose: bool = False
) -> Tensor:
    """(outputs, Cout) of (inputs, Cin) features and (K, Cin, Cout) kernels of one dtype.

    The kernels are in reverse and (K, Cout, Cin) where asked.
    """
    if tiled:
        from bevctl.ops.kernels import sparse_conv as triton_kernels

        return triton_kernels.convolve(features, kernels, rules.tiles, rules.outputs, reverse, transpose)
    kernels = kernels.transpose(1, 2) if transpose else kernels
    stacked = (kernels.flip(0) if reverse else kernels).flatten(0, 1)
    out = features.new_empty(rules.outputs, stacked.shape[1])
    for rows, gathered in _gathered(features, rules.table):
        torch.mm(gathered, stacked, out=out[rows])
    return out


def _kernel_gradient(features: Tensor, grad: Tensor, rules: RuleBook, tiled: bool) -> Tensor:
    """(K, Cin, Cout) gradient, added up over pieces in at least float32."""
    if tiled:
        from bevctl.ops.kernels import sparse_conv as triton_kernels

        return triton_kernels.kernel_gradient(features, grad, rules.tiles)
    wide = torch.promote_types(features.dtype, torch.float32)
    offsets, channels = rules.offsets, features.shape[1]
    total = features.new_zeros(grad.shape[1], offsets * channels, dtype=wide)
    for rows, gathered in _gathered(features, rules.table):
        total += grad[rows].T @ gathered
    return total.T.reshape(offsets, channels, -1)


def _gathered(features: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of output rows, each with the (rows, K · Cin) features that its rows meet."""
    width = table.shape[1] * features.shape[1]
    step = max(1, _piece_elements(features) // width)
    padded = torch.cat([features, features.new_zeros(_NOTHINGS, features.shape[1])])
    nothings = len(features) + torch.arange(_NOTHINGS, dtype=table.dtype, device=table.device)
    for first in range(0, len(table), step):
        rows = slice(first, first + step)
        met = table[rows].flatten()
        spread = nothings.repeat(-(-len(met) // _NOTHINGS))[: len(met)]
        met = torch.where(met < len(features), met, spread)
        yield rows, _take(padded, met).view(-1, width)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index]; a GPU would start a block of threads for each row, however short, unless columns are asked for."""
    if not rows.is_cuda or rows.shape[1] * rows.element_size() % 16:
        return rows.index_select(0, index)
    words = rows.view(torch.complex128)
    column = torch.arange(words.shape[1], device=rows.device)
    return words[index.long()[:, None], column].view(rows.dtype)


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

    def forward(self, x: Sparse) -> Sparse:
        return x.submanifold(self.weight)

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
        self.window = Window(kernel, stride, padding)
        self.weight = _kernel_parameter(kernel, in_channels, out_channels)

    def forward(self, x: Sparse) -> Sparse:
        return x.strided(self.weight, self.window)

    def extra_repr(self) -> str:
        channels = f"{self.weight.shape[3]}, {self.weight.shape[4]}"
        return f"{channels}, kernel={self.window.kernel}, stride={self.window.stride}, padding={self.window.padding}"


def _kernel_parameter(kernel: Triple, in_channels: int, out_channels: int) -> nn.Parameter:
    bound = 1 / math.sqrt(math.prod(kernel) * in_channels)
    return nn.Parameter(torch.empty(*kernel, in_channels, out_channels).uniform_(-bound, bound))
