"""PETRv2 (Liu et al., ICCV 2023): image features of two frames placed in space, and queries that look at them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.batch import Batch, Calibration
from bevctl.errors import BevctlError, ExitCode
from bevctl.models.image_input import ImageInput
from bevctl.models.network import TaskNetwork
from bevctl.models.petrv2_head import PetrObjectHead
from bevctl.models.petrv2_map_head import PetrMapHead
from bevctl.models.petrv2_position import ImagePositions
from bevctl.models.petrv2_transformer import ImageMemory
from bevctl.models.view_geometry import frustum_rays

SHORTEST_INTERVAL, USUAL_INTERVAL = 0.05, 0.5
"""s between two frames; a pair that is closer is one frame twice, and counts as the usual distance of keyframes."""


class PetrImageEncoder(nn.Module):
    """Images of all views to what queries look at."""

    def __init__(
        self, normalize: ImageInput, backbone: nn.Module, neck: nn.Module, position: ImagePositions, frames: int
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.neck = neck
        self.position = position
        self.frames = frames

    def forward(self, images: Tensor, calibration: Calibration, padding: Tensor | None) -> ImageMemory:
        """(B, V, 3, H, W) images, uint8 RGB or already normalised, `padding` (B, V, H, W) True where filled up."""
        batch, views = images.shape[:2]
        inputs = self.normalize(images, padding).flatten(0, 1)
        features = self.neck(self.backbone(inputs))
        size = (features.shape[2], features.shape[3])
        rays, origins = frustum_rays(feature_pixels(images.shape[-2:], size, images.device), calibration)
        if padding is not None:
            padding = F.interpolate(padding.float(), size).bool()
        values, keys = self.position(features.unflatten(0, (batch, views)), rays, origins, padding)
        return ImageMemory(
            keys=keys,
            values=values,
            padding=None if padding is None else padding.flatten(1),
            interval=self._interval(calibration.times),
        )

    def _interval(self, times: Tensor) -> Tensor | None:
        """(B,) s from the earlier frame to the current one, of (B, V) ages of the images."""
        if self.frames == 1:
            return None
        current, earlier = times.float().unflatten(1, (2, -1)).mean(2).unbind(1)
        interval = earlier - current
        return torch.where(interval.abs() < SHORTEST_INTERVAL, USUAL_INTERVAL, interval)


class PETRv2(TaskNetwork):
    """Detection, map segmentation, or both, from the views of one or two frames."""

    def __init__(self, encoder: PetrImageEncoder, heads: Mapping[str, PetrObjectHead | PetrMapHead]) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({"camera": encoder})
        self.heads = nn.ModuleDict(heads)

    def head_inputs(self, batch: Batch) -> dict[str, ImageMemory]:
        """The same features for each head. Raises BevctlError where the batch has not the images of all frames."""
        encoder = cast("PetrImageEncoder", self.encoders["camera"])
        if batch.images is None or batch.images.shape[1] % encoder.frames:
            raise BevctlError(
                f"The model reads images of {encoder.frames} frames, but the batch has "
                f"{0 if batch.images is None else batch.images.shape[1]} views.",
                "Load the cameras, and an earlier frame if there are two.",
                ExitCode.RUN_FAILED,
            )
        memory: ImageMemory = encoder(batch.images, batch.calibration, batch.padding)
        return dict.fromkeys(self.heads, memory)


def feature_pixels(image: tuple[int, int] | torch.Size, feature: tuple[int, int], device: torch.device) -> Tensor:
    """(h, w, 2) u, v of the first pixel of each feature's cell."""
    v, u = (torch.arange(n, device=device) * (size / n) for size, n in zip(image, feature, strict=True))
    rows, columns = torch.meshgrid(v, u, indexing="ij")
    return torch.stack([columns, rows], dim=-1)
