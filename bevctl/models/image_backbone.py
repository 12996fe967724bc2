"""Image backbones: our Swin, or any timm model that can return its feature maps."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor, nn

from bevctl.config.schema import CameraConfig
from bevctl.errors import BevctlError
from bevctl.models.layers import recompute
from bevctl.models.swin import SwinTransformer

STRIDES = (8, 16, 32)


class TimmBackbone(nn.Module):
    """The last three feature levels of a timm model, randomly initialised; entry `model`.

    Raises BevctlError where timm is missing, has no such model, or the model has no levels at strides 8, 16 and 32.
    """

    def __init__(self, name: str, image_size: tuple[int, int], checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.model = _timm_model(name, image_size)
        strides = tuple(self.model.feature_info.reduction())
        if strides != STRIDES:
            raise BevctlError(
                f"The last levels of timm's {name!r} have strides {strides}, not {STRIDES}.",
                "Choose a backbone with a feature pyramid, for example resnet50 or convnext_tiny.",
            )
        self.channels = tuple(self.model.feature_info.channels())
        self.channels_last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised → three maps (B, C_i, H / s, W / s), s = 8, 16, 32."""
        maps = recompute(self.model, images, enabled=self.checkpointing)
        return [x.permute(0, 3, 1, 2) if self.channels_last else x for x in maps]


def _timm_model(name: str, image_size: tuple[int, int]) -> Any:
    try:
        import timm
    except ImportError as error:
        raise BevctlError(
            f"Image backbone {name!r} needs timm, which cannot be imported: {error}.",
            "Install it with: pip install 'bevctl[timm]', or set model.camera.backbone=swin.",
        ) from error
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, ["swin", *timm.list_models()], n=1)
        known = "python -c 'import timm; print(timm.list_models())' prints the names."
        raise BevctlError(f"Unknown image backbone {name!r}.", f"Did you mean {close[0]!r}?" if close else known)
    options: dict[str, Any] = {"features_only": True, "out_indices": (-3, -2, -1), "pretrained": False}
    try:
        return timm.create_model(name, img_size=image_size, **options)
    except TypeError:
        # Only models with windows or position embeddings take an image size.
        return timm.create_model(name, **options)


def build_image_backbone(config: CameraConfig, checkpointing: bool = False) -> SwinTransformer | TimmBackbone:
    """The backbone that `config.backbone` names: "swin" or a timm model."""
    if config.backbone == "swin":
        return SwinTransformer(config.swin, checkpointing)
    return TimmBackbone(config.backbone, config.image_size, checkpointing)
