"""Layers of one kind, each with weights and inputs of its own, computed as one: fewer operations to ask a GPU for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bevctl.models.layers import is_plain


def all_plain(modules: Sequence[nn.Module]) -> bool:
    """Whether nothing is wrapped around or hooked into `modules` and what is inside, so that calls may be left out."""
    return is_plain(*(inner for module in modules for inner in module.modules()))


def parameters_of(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor]:
    """(N, C, C_in) weights and (N, C) biases of N linear layers."""
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    weights, biases = torch.stack([one.weight for one in linear]), torch.stack([one.bias for one in linear])
    if weights.requires_grad:
        weights.register_hook(Tensor.contiguous)  # else each layer's gradient is put in order by itself
    return weights, biases


def multiplied(parameters: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
    """x[n] · weights[n]ᵀ + biases[n] of (N, C, C_in) weights, (N, C) biases and (N, R, C_in) inputs: (N, R, C)."""
    weights, biases = parameters
    return torch.baddbmm(biases[:, None], x, weights.mT)


def side_by_side(sequences: Sequence[Sequence[nn.Module]], x: Tensor) -> Tensor:
    """Sequence n, all of the same kinds of layers, of x[n]: (N, R, C_in) → (N, R, C)."""
    for layers in zip(*sequences, strict=True):
        if isinstance(layers[0], nn.Linear):
            x = multiplied(parameters_of(layers), x)
        elif next(layers[0].parameters(), None) is None:
            x = layers[0](x)
        else:
            x = torch.stack([layer(one) for layer, one in zip(layers, x.unbind(), strict=True)])
    return x
