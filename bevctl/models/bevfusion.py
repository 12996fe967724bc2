"""BEVFusion (Liu et al., ICRA 2023): sensors into one bird's-eye view, and tasks out of it.

Module names, and so state-dict keys, are those of mit-bevfusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bevctl.batch import Batch, Calibration
from bevctl.errors import BevctlError, ExitCode
from bevctl.models.bev_decoder import BevDecoder, ConvFuser, TaskDecoders
from bevctl.models.image_backbone import ImageBackbone
from bevctl.models.image_input import ImageInput
from bevctl.models.layers import recompute
from bevctl.models.lidar import VoxelLidarEncoder
from bevctl.models.map_head import MapHead
from bevctl.models.neck import GeneralizedLSSFPN
from bevctl.models.network import TaskNetwork
from bevctl.models.transfusion import TransFusionHead
from bevctl.models.view_transform import DepthLSSTransform, LSSTransform
from bevctl.ops.sparse_conv import Sparse


class CameraEncoder(nn.Module):
    """Images to the bird's-eye view; `checkpointing` recomputes the view transform in the backward pass."""

    def __init__(
        self,
        normalize: ImageInput,
        backbone: ImageBackbone,
        neck: GeneralizedLSSFPN,
        vtransform: DepthLSSTransform | LSSTransform,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.backbone = backbone
        self.neck = neck
        self.vtransform = vtransform
        self.checkpointing = checkpointing

    def forward(self, images: Tensor, points: list[Tensor] | None, calibration: Calibration) -> Tensor:
        """(B, N, 3, H, W) images, uint8 RGB or already normalised → (B, C, X, Y)."""
        batch, cameras = images.shape[:2]
        maps = self.backbone(self.normalize(images.flatten(0, 1)))
        features = self.neck(maps)[0].unflatten(0, (batch, cameras))
        bev: Tensor = recompute(self.vtransform, features, points, calibration, enabled=self.checkpointing)
        return bev


class BEVFusion(TaskNetwork):
    """Any of camera and LiDAR, any of detection and map.

    `fuser` joins two sensors and is None for one. `checkpoint_lidar` recomputes the LiDAR branch in the backward pass.
    `point_dtype` is what points are rounded to before anything reads them.
    """

    def __init__(
        self,
        encoders: Mapping[str, CameraEncoder | VoxelLidarEncoder],
        fuser: ConvFuser | None,
        decoder: BevDecoder | TaskDecoders,
        heads: Mapping[str, TransFusionHead | MapHead],
        checkpoint_lidar: bool = False,
        point_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(encoders)
        self.fuser = fuser
        self.decoder = decoder
        self.heads = nn.ModuleDict(heads)
        self.checkpoint_lidar = checkpoint_lidar
        self.point_dtype = point_dtype

    def head_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """The map (B, C, X, Y) that each head reads, by task."""
        if self.point_dtype != torch.float32 and batch.points is not None:
            batch = dataclasses.replace(batch, points=[p.to(self.point_dtype).float() for p in batch.points])
        # Asked for before the camera's work is queued: the host waits for their number and for nothing else.
        voxels = self._voxels(batch)
        maps = [self._encode(sensor, batch, voxels) for sensor in self.encoders]
        fused = maps[0] if self.fuser is None else self.fuser(maps)
        decoded: Tensor | dict[str, Tensor] = self.decoder(fused)
        return decoded if isinstance(decoded, dict) else dict.fromkeys(self.heads, decoded)

    def _voxels(self, batch: Batch) -> Sparse | None:
        encoder = dict(self.encoders.items()).get("lidar")
        if not isinstance(encoder, VoxelLidarEncoder) or batch.points is None:
            return None
        return encoder.prepare(batch.points)

    def _encode(self, sensor: str, batch: Batch, voxels: Sparse | None) -> Tensor:
        encoder = self.encoders[sensor]
        if sensor == "camera" and batch.images is not None:
            encoded: Tensor = encoder(batch.images, batch.points, batch.calibration)
        elif sensor == "lidar" and voxels is not None:
            encoded = recompute(encoder, voxels, enabled=self.checkpoint_lidar)
        else:
            raise BevctlError(
                f"The model reads {sensor} data, but the batch has none.",
                f"Train with model.{sensor}=null, or load that sensor.",
                ExitCode.RUN_FAILED,
            )
        return encoded
