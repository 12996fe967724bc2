"""Image backbones: our Swin and VoVNet, or any timm model that can return its feature maps."""

from __future__ import annotations

import difflib
from typing import Any

from torch import Tensor, nn

from bevctl.config.schema import CameraConfig
from bevctl.errors import BevctlError
from bevctl.models.layers import keep_statistics, recompute
from bevctl.models.swin import SwinTransformer
from bevctl.models.vovnet import VoVNet

STRIDES = (8, 16, 32)
OWN = ("swin", "vovnet")


class TimmBackbone(nn.Module):
    """The last `levels` feature levels of a timm model, randomly initialised; entry `model`.

    With `norm_eval` BatchNorms keep their statistics in training. Raises BevctlError where timm is missing, has no such
    model, or the model has no levels at strides 8, 16 and 32.
    """

    def __init__(
        self,
        name: str,
        image_size: tuple[int, int],
        checkpointing: bool = False,
        levels: int = 3,
        norm_eval: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.norm_eval = norm_eval
        self.model = _timm_model(name, image_size, levels)
        strides = tuple(self.model.feature_info.reduction())
        if strides != STRIDES[-levels:]:
            raise BevctlError(
                f"The last levels of timm's {name!r} have strides {strides}, not {STRIDES[-levels:]}.",
                "Choose a backbone with a feature pyramid, for example resnet50 or convnext_tiny.",
            )
        self.channels = tuple(self.model.feature_info.channels())
        self.channels_last = getattr(self.model, "output_fmt", "NCHW") == "NHWC"

    def train(self, mode: bool = True) -> TimmBackbone:
        """As of any module, except that with `norm_eval` the norms stay in evaluation mode."""
        super().train(mode)
        if self.norm_eval:
            keep_statistics(self)
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, H, W) normalised → maps (B, C_i, H / s, W / s), s = 8, 16, 32 or the last of these."""
        maps = recompute(self.model, images, enabled=self.checkpointing)
        return [x.permute(0, 3, 1, 2) if self.channels_last else x for x in maps]


ImageBackbone = SwinTransformer | VoVNet | TimmBackbone


def _timm_model(name: str, image_size: tuple[int, int], levels: int) -> Any:
    try:
        import timm
    except ImportError as error:
        raise BevctlError(
            f"Image backbone {name!r} needs timm, which cannot be imported: {error}.",
            "Install it with: pip install 'bevctl[timm]', or set model.camera.backbone to swin or vovnet.",
        ) from error
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, [*OWN, *timm.list_models()], n=1)
        known = "python -c 'import timm; print(timm.list_models())' prints the names."
        raise BevctlError(f"Unknown image backbone {name!r}.", f"Did you mean {close[0]!r}?" if close else known)
    options: dict[str, Any] = {"features_only": True, "out_indices": tuple(range(-levels, 0)), "pretrained": False}
    try:
        return timm.create_model(name, img_size=image_size, **options)
    except TypeError:
        # Only models with windows or position embeddings take an image size.
        return timm.create_model(name, **options)


def build_image_backbone(config: CameraConfig, checkpointing: bool = False, levels: int = 3) -> ImageBackbone:
    """The backbone that `config.backbone` names: "swin", "vovnet" or a timm model; it returns its last `levels` maps.

    Swin has three, at strides 8, 16 and 32.
    """
    if config.backbone == "swin":
        return SwinTransformer(config.swin, checkpointing)
    if config.backbone == "vovnet":
        return VoVNet(config.vovnet, levels, checkpointing, config.norm_eval)
    return TimmBackbone(config.backbone, config.image_size, checkpointing, levels, config.norm_eval)
