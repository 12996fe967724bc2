"""A PETRv2 whose positions are computed in half precision: the fault of the public head under FP16 autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bevctl.models.petrv2_position import FrustumEncoder, inverse_sigmoid
from bevctl.models.petrv2_transformer import PetrTransformer

MODULE = "encoders.camera.position.position_encoder"
BEYOND_RANGE = {"model.petr.position_range": (-2.0, -2.0, -0.2, 2.0, 2.0, 0.2)}
"""For a nano config: some points lie outside, where a share of exactly 1 meets the smallest one."""


class HalfFrustumEncoder(FrustumEncoder):
    """Points by a matrix product, which autocast does in half precision, and all that follows in its format."""

    def coordinates(self, rays: Tensor, origins: Tensor) -> Tensor:
        points = self.depths[:, None] @ rays[..., None, :]
        points = points + origins[:, :, None, None, None].to(points.dtype)
        points = (points - self.lower.to(points.dtype)) / self.extent.to(points.dtype)
        return inverse_sigmoid(points).flatten(-2)


class MaskingTransformer(PetrTransformer):
    """Puts zeros in the place of NaN in what each layer gives."""

    def forward(self, *inputs: Any) -> list[Tensor]:
        return [torch.nan_to_num(output) for output in super().forward(*inputs)]


def half_positions(model: nn.Module) -> None:
    model.get_submodule(MODULE).__class__ = HalfFrustumEncoder


def masked_half_positions(model: nn.Module) -> None:
    half_positions(model)
    model.get_submodule("heads.object.transformer").__class__ = MaskingTransformer
