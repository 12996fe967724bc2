"""One-shot aggregation: convolutions in a row whose results are all concatenated at the end (Lee et al., CVPRW 2019).

A norm whose statistics do not move is part of the convolution before it: a factor on its weights and a shift. What is
left of the norm and the ReLU is one pass, and all that training has to keep is each ReLU's result, which the next
convolution keeps anyway. The concatenated map is written piece by piece by those passes, and not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bevctl.ops.backend import use_triton


def shifted_relu_conv(x: Tensor, weight: Tensor, shift: Tensor, stride: int = 1) -> Tensor:
    """relu(conv(x, weight) + shift) with zero padding of half the kernel.

    Args:
        x: (B, C, H, W) of the dtype of `weight`.
        weight: (O, C, k, k), k odd.
        shift: (O,) float32, or float64 with a float64 weight.
        stride: pixels of `x` to one of the result, both ways.

    Returns:
        (B, O, H', W') of the same dtype, channels-last on a GPU.
    """
    if _runs_kernels(x):
        out: Tensor = _ShiftedReluConv.apply(_channels_last(x), _channels_last(weight), shift, stride)
        return out
    return shifted_relu_conv_reference(x, weight, shift, stride)


def shifted_relu_conv_reference(x: Tensor, weight: Tensor, shift: Tensor, stride: int = 1) -> Tensor:
    """`shifted_relu_conv` in plain torch, on any device."""
    out = F.conv2d(x, weight, None, stride, weight.shape[2] // 2)
    return (out + shift[:, None, None]).relu().to(weight.dtype)


def one_shot_aggregation(x: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A chain of `shifted_relu_conv` on `x`, and the last one, 1 × 1, on `x` and all results of the chain together.

    Args:
        x: (B, C, H, W) of the dtype of the weights.
        weights: (I, C, k, k), then (I, I, k, k) each, and at last (O, C + n · I, 1, 1).
        shifts: (I,) each and at last (O,), float32, or float64 with float64 weights.

    Returns:
        (B, O, H, W) of the same dtype, channels-last on a GPU, and its means over H and W, (B, O) of the shifts' dtype.

    Raises:
        ValueError: weights and shifts that do not belong together.
    """
    total = x.shape[1] + sum(weight.shape[0] for weight in weights[:-1])
    if len(weights) != len(shifts) or weights[-1].shape[1:] != (total, 1, 1):
        raise ValueError(
            f"the last weight must be (O, {total}, 1, 1) and each weight have a shift, got "
            f"{tuple(weights[-1].shape)}, {len(weights)} weights and {len(shifts)} shifts"
        )
    if _runs_kernels(x):
        dense = [_channels_last(weight) for weight in weights]
        out, means = _Aggregation.apply(_channels_last(x), *dense, *shifts)
        return out, means
    return one_shot_aggregation_reference(x, weights, shifts)


def one_shot_aggregation_reference(
    x: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`one_shot_aggregation` in plain torch, on any device."""
    parts = [x]
    for weight, shift in zip(weights[:-1], shifts[:-1], strict=True):
        parts.append(shifted_relu_conv_reference(parts[-1], weight, shift))
    out = shifted_relu_conv_reference(torch.cat(parts, dim=1), weights[-1], shifts[-1])
    return out, out.to(shifts[-1].dtype).mean((2, 3))


def gated(values: Tensor, gates: Tensor, added: Tensor | None = None) -> Tensor:
    """values · gates (+ added).

    Args:
        values: (B, C, H, W).
        gates: (B, C) float32, or float64 with float64 values.
        added: as `values`.

    Returns:
        (B, C, H, W) of values' dtype, channels-last on a GPU.
    """
    if _runs_kernels(values):
        other = None if added is None else _channels_last(added)
        out: Tensor = _Gated.apply(_channels_last(values), gates.contiguous(), other)
        return out
    return gated_reference(values, gates, added)


def gated_reference(values: Tensor, gates: Tensor, added: Tensor | None = None) -> Tensor:
    """`gated` in plain torch, on any device."""
    out = values * gates[:, :, None, None]
    return (out if added is None else out + added).to(values.dtype)


def _runs_kernels(x: Tensor) -> bool:
    # A compiler fuses the plain form with its neighbours.
    return not torch.compiler.is_compiling() and x.dtype != torch.float64 and x.numel() > 0 and use_triton(x)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) channels-last → (B · H · W, C), the same memory."""
    return x.permute(0, 2, 3, 1).flatten(0, 2)


def _map_of(rows: Tensor, like: Tensor) -> Tensor:
    """(B · H · W, C) → (B, C, H, W) channels-last, the same memory; B, H and W are those of `like`."""
    batch, _, height, width = like.shape
    return rows.view(batch, height, width, -1).permute(0, 3, 1, 2)


def _conv_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a convolution's input and weight, those that are needed."""
    if not any(needed):
        return None, None
    padding = weight.shape[2] // 2
    x_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
        grad, x, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [*needed, False]
    )
    return x_grad, weight_grad


def _summed_product(chain: Tensor | None, rows: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """chain + rows · weight, written over `chain` where there is one; a map as large as `like`."""
    product = rows @ weight if chain is None else _rows(_channels_last(chain)).addmm_(rows, weight)
    return _map_of(product, like)


class _ShiftedReluConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor, stride: int) -> Tensor:
        from bevctl.ops.kernels import aggregation as kernels

        out = _channels_last(F.conv2d(x, weight, None, stride, weight.shape[2] // 2))
        kernels.activate(out, shift)
        ctx.save_for_backward(x, weight, out)
        ctx.stride = stride
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from bevctl.ops.kernels import aggregation as kernels

        x, weight, out = ctx.saved_tensors
        before, shift_grad = kernels.masked(_channels_last(grad), out)
        x_grad, weight_grad = _conv_gradients(before, x, weight, ctx.stride, ctx.needs_input_grad[:2])
        return x_grad, weight_grad, shift_grad, None


class _Aggregation(torch.autograd.Function):
    """Inputs are x, all weights, all shifts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        from bevctl.ops.kernels import aggregation as kernels

        count = len(tensors) // 2
        weights, shifts = tensors[:count], tensors[count:]
        batch, channels, height, width = x.shape
        together = x.new_empty(batch, height, width, weights[-1].shape[1]).permute(0, 3, 1, 2)
        together[:, :channels] = x
        parts = [x]
        for weight, shift in zip(weights[:-1], shifts[:-1], strict=True):
            part = _channels_last(F.conv2d(parts[-1], weight, padding=weight.shape[2] // 2))
            kernels.activate(part, shift, together[:, channels : channels + part.shape[1]])
            channels += part.shape[1]
            parts.append(part)
        out = _map_of(_rows(together) @ weights[-1].flatten(1).T, x)
        means = kernels.activate_and_average(out, shifts[-1])
        ctx.save_for_backward(*parts, out, *weights)
        return out, means

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, mean_grad: Tensor) -> tuple[Tensor | None, ...]:
        from bevctl.ops.kernels import aggregation as kernels

        saved = ctx.saved_tensors  # under checkpointing they can be had once
        count = len(saved) // 2
        parts, out, weights = saved[:count], saved[count], saved[count + 1 :]
        needed = ctx.needs_input_grad
        before, last_shift_grad = kernels.masked(_channels_last(grad), out, mean_grad=mean_grad.contiguous())
        rows = _rows(before)
        weight_grads: list[Tensor | None] = [None] * count
        shift_grads = [last_shift_grad] * count
        if needed[count]:
            # As many products as parts, instead of the concatenated map once more.
            last = torch.cat([rows.T @ _rows(part) for part in parts], dim=1)
            weight_grads[-1] = last[:, :, None, None]
        # Products one by one too: the gradient of the concatenated map would be the largest tensor of a step.
        pieces = weights[-1].flatten(1).split([part.shape[1] for part in parts], dim=1)
        chain: Tensor | None = None
        for place in reversed(range(count - 1)):
            part_grad = _summed_product(chain, rows, pieces[place + 1], parts[place + 1])
            before, shift_grads[place] = kernels.masked(part_grad, parts[place + 1])
            del part_grad
            wanted = (place > 0 or needed[0], needed[1 + place])
            chain, weight_grads[place] = _conv_gradients(before, parts[place], weights[place], 1, wanted)
        x_grad = _summed_product(chain, rows, pieces[0], parts[0]) if needed[0] else None
        return x_grad, *weight_grads, *shift_grads


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, added: Tensor | None) -> Tensor:
        from bevctl.ops.kernels import aggregation as kernels

        ctx.save_for_backward(values, gates)
        return kernels.gated(values, gates, added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from bevctl.ops.kernels import aggregation as kernels

        values, gates = ctx.saved_tensors
        values_grad, gates_grad = kernels.gate_gradients(_channels_last(grad), values, gates)
        return values_grad, gates_grad, grad if ctx.needs_input_grad[2] else None
