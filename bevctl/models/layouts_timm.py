"""State dicts of image backbones as torchvision and timm release them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from bevctl.models.layouts import BACKBONE

_NUMBERED_STAGE = re.compile(r"^(\w+)\.(\d+)")


def match_backbone(state: Mapping[str, Tensor], model_names: Iterable[str]) -> dict[str, Tensor]:
    """A state whose names are those of a timm model alone, bare or below `backbone.`, at that model's place in ours.

    Entries that the model does not have there keep their names.
    """
    known = set(model_names)
    matched = {}
    for key, value in state.items():
        inside = key.removeprefix("backbone.")
        # timm joins the numbers of stages when it takes feature maps of a model.
        places = (f"{BACKBONE}model.{name}" for name in (inside, _NUMBERED_STAGE.sub(r"\1_\2", inside)))
        matched[next((place for place in places if place in known), key)] = value
    return matched
