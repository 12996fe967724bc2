from __future__ import annotations

import pytest
import torch

from bevctl.config.schema import CameraConfig
from bevctl.models.image_input import BLUE_FIRST, ImageInput

RGB = (124, 16, 250)


def _pixel() -> torch.Tensor:
    """(2, 5, 3, 1, 1): one colour everywhere."""
    return torch.tensor(RGB, dtype=torch.uint8).view(3, 1, 1).expand(2, 5, 3, 1, 1).contiguous()


@pytest.mark.parametrize(
    ("normalize", "colour", "mean", "std"),
    [
        ("imagenet", RGB, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
        ("imagenet_bgr", RGB[::-1], (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)),
    ],
)
def test_a_colour_by_hand(
    normalize: str, colour: tuple[int, ...], mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Means and deviations over 0..255, as the original configurations state them."""
    expected = [(c - m) / s for c, m, s in zip(colour, mean, std, strict=True)]
    found = ImageInput(normalize)(_pixel())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[1, 3, :, 0, 0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_the_config_offers_what_there_is() -> None:
    assert CameraConfig.__dataclass_fields__["normalize"].metadata["choices"] == tuple(BLUE_FIRST)


def test_float_images_pass() -> None:
    images = torch.randn(1, 2, 3, 4, 4)
    assert torch.equal(ImageInput("imagenet_bgr")(images), images)


def test_padding_is_zero_in_every_channel() -> None:
    padding = torch.zeros(2, 5, 1, 1, dtype=torch.bool)
    padding[1, 2] = True
    found = ImageInput("imagenet")(_pixel(), padding)
    assert (found == 0).flatten(2).all(dim=2).equal(padding[..., 0, 0])


def test_nothing_of_it_is_in_a_checkpoint() -> None:
    assert not ImageInput("imagenet").state_dict()
