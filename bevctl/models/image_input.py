"""Images of a batch as an image backbone reads them: normalised on the device, in the backbone's order of channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE_MEAN = (0.485, 0.456, 0.406)
"""Red, green and blue over ImageNet, pixels from 0 to 1."""
IMAGE_STD = (0.229, 0.224, 0.225)
BLUE_FIRST = {"imagenet": False, "imagenet_bgr": True}
"""For each value of model.camera.normalize: whether channels come blue, green, red."""


class ImageInput(nn.Module):
    """uint8 RGB images → ImageNet-normalised ones; has no weights and no entry in a state dict.

    `normalize` is imagenet, or imagenet_bgr for backbones that learned from images with blue first (PETRv2's VoVNet).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, normalize: str) -> None:
        super().__init__()
        self.blue_first = BLUE_FIRST[normalize]
        mean, std = torch.tensor(IMAGE_MEAN).view(3, 1, 1), torch.tensor(IMAGE_STD).view(3, 1, 1)
        self.register_buffer("mean", mean.flip(0) if self.blue_first else mean, persistent=False)
        self.register_buffer("std", std.flip(0) if self.blue_first else std, persistent=False)

    def forward(self, images: Tensor, padding: Tensor | None = None) -> Tensor:
        """(…, 3, H, W) uint8 RGB → float32 of the same shape; float images pass as they are, already normalised.

        Pixels where `padding` (…, H, W) is True become zero, as of an image padded after it was normalised.
        """
        if images.dtype == torch.uint8:
            images = images.flip(-3) if self.blue_first else images
            images = (images.float() / 255 - self.mean) / self.std
        return images if padding is None else images.masked_fill(padding.unsqueeze(-3), 0.0)
