"""From a config to a PETRv2 model."""

from __future__ import annotations

from bevctl.config.schema import Config
from bevctl.models.image_backbone import build_image_backbone
from bevctl.models.image_input import ImageInput
from bevctl.models.neck import CPFPN
from bevctl.models.petrv2 import PetrImageEncoder, PETRv2
from bevctl.models.petrv2_head import PetrObjectHead
from bevctl.models.petrv2_map_head import PetrMapHead
from bevctl.models.petrv2_position import ImagePositions

LEVELS = 2
"""Maps of the image backbone that the neck reads, at strides 16 and 32."""


def build_petrv2(config: Config) -> PETRv2:
    """PETRv2 with the heads that are not null, randomly initialised."""
    model = config.model
    assert model.camera is not None, "petrv2 has cameras"
    assert model.petr is not None, "petrv2 has its section"
    recomputed = {part: part in model.checkpointing for part in ("camera", "decoder")}
    backbone = build_image_backbone(model.camera, recomputed["camera"], levels=LEVELS)
    neck = CPFPN(backbone.channels, model.camera.neck_channels)
    position = ImagePositions(model.petr, model.camera.neck_channels, recomputed["camera"])
    encoder = PetrImageEncoder(ImageInput(model.camera.normalize), backbone, neck, position, config.data.frames)
    heads: dict[str, PetrObjectHead | PetrMapHead] = {}
    if model.object is not None:
        heads["object"] = PetrObjectHead(
            model.object, model.petr, len(config.data.classes), model.point_cloud_range, recomputed["decoder"]
        )
    if model.map is not None:
        heads["map"] = PetrMapHead(model.map, model.petr, config.data.map_classes, recomputed["decoder"])
    network = PETRv2(encoder, heads)
    network.freeze(model.freeze)
    return network
