"""State dicts of the PETR repository (PETRv2 detection and BEV segmentation), as functions to and from our names.

Its segmentation model decodes the map after every layer with the same modules, which its files hold once a layer; its
detection model keeps the weights of its box loss as an entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bevctl.errors import BevctlError
from bevctl.models.layouts_vovnet import from_vovnet_name, to_vovnet_name

HEAD = "pts_bbox_head."
ROOTS = (f"{HEAD}transformer.", f"{HEAD}transformer_lane.", f"{HEAD}position_encoder.")
"""Parts that no model of mmdet3d's BEVFusion has, whose other names are the same."""
POSITION = "encoders.camera.position."
"""A part that every PETRv2 of ours has, and no other model."""
CODE_WEIGHTS = f"{HEAD}code_weights"
MAP_CLASSES = {"dri": "drivable_area", "lan": "divider", "vie": "vehicle"}
"""Its names of map classes, and ours."""
_CODE_LENGTH = 10
_BACKBONE = ("encoders.camera.backbone.", "img_backbone.")
_NECK = ("encoders.camera.neck.", "img_neck.")
_LANES = "heads.map.lane_branches."
_PREFIXES = (
    (f"{POSITION}input_proj.", f"{HEAD}input_proj."),
    (f"{POSITION}adapt_pos3d.", f"{HEAD}adapt_pos3d."),
    (f"{POSITION}position_encoder.mlp.", f"{HEAD}position_encoder."),
    (f"{POSITION}fpe.", f"{HEAD}fpe."),
    ("heads.object.transformer.", f"{HEAD}transformer.decoder."),
    ("heads.object.reference_points.", f"{HEAD}reference_points."),
    ("heads.object.query_embedding.", f"{HEAD}query_embedding."),
    ("heads.object.cls_branches.", f"{HEAD}cls_branches."),
    ("heads.object.reg_branches.", f"{HEAD}reg_branches."),
    ("heads.map.transformer.", f"{HEAD}transformer_lane.decoder."),
    ("heads.map.query_embedding.", f"{HEAD}query_embedding_lane."),
)
_GUIDANCE_OF_SEGMENTATION = f"{HEAD}se."
_LAYER = (
    ("self_attn.", "attentions.0.attn."),
    ("cross_attn.", "attentions.1.attn."),
    ("linear1.", "ffns.0.layers.0.0."),
    ("linear2.", "ffns.0.layers.1."),
    ("norm1.", "norms.0."),
    ("norm2.", "norms.1."),
    ("norm3.", "norms.2."),
)
_DECODER_LAYER = re.compile(r"(heads\.\w+\.transformer\.layers\.\d+\.)(.+)")
_NECK_CONV = re.compile(r"(lateral_convs\.\d+|fpn_convs\.\d+)\.(?:conv\.)?(\w+)")
_LANE = re.compile(r"pts_bbox_head\.lane_branches_(dri|lan|vie)\.(\d+)\.(.+)")


def from_petr(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state of the PETR repository under our names; what has no place in our model keeps its name.

    The weights of its box loss are left out. Raises BevctlError where map decoders differ that are one.
    """
    converted: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for theirs, value in state.items():
        if theirs == CODE_WEIGHTS:
            continue
        ours = from_petr_name(theirs)
        if ours in converted and not _same(converted[ours], value):
            raise BevctlError(
                f"{sources[ours]} and {theirs} differ, which are one tensor in PETR.",
                "The file is damaged, or of another model: take another checkpoint.",
            )
        converted.setdefault(ours, value)
        sources.setdefault(ours, theirs)
    return converted


def to_petr(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state of a PETRv2 with one head, under the names of the PETR repository; entries that it lacks are left out.

    Raises ValueError for a state with both heads.
    """
    has_boxes, has_map = (any(key.startswith(f"heads.{task}.") for key in state) for task in ("object", "map"))
    if has_boxes and has_map:
        raise ValueError("a model of PETR has one head")
    layers = len({key.split(".")[4] for key in state if key.startswith("heads.map.transformer.layers.")})
    exported: dict[str, Tensor] = {}
    for ours, value in state.items():
        for theirs in to_petr_names(ours, layers):
            guided = theirs.replace(f"{HEAD}fpe.", _GUIDANCE_OF_SEGMENTATION) if has_map else theirs
            exported[guided] = value
    if has_boxes:
        exported[CODE_WEIGHTS] = torch.ones(_CODE_LENGTH)
    return exported


def unequal_code_weights(state: Mapping[str, Tensor]) -> list[float] | None:
    """The weights of the box loss in a file of the PETR repository, unless they are all one as ours."""
    weights = next((value for key, value in state.items() if key.endswith(CODE_WEIGHTS)), None)
    if weights is None or bool((weights == 1).all()):
        return None
    return [float(weight) for weight in weights.flatten()]


def from_petr_name(name: str) -> str:
    """Our name of an entry of the PETR repository; an unknown one as it is."""
    if name.startswith(_BACKBONE[1]):
        inside = name.removeprefix(_BACKBONE[1])
        # What is no VoVNet is one of torchvision's kind, which timm brings here.
        return _BACKBONE[0] + (from_vovnet_name(inside) or f"model.{inside}")
    if match := _LANE.fullmatch(name):
        return f"{_LANES}{MAP_CLASSES[match[1]]}.{match[3]}"
    if name.startswith(_NECK[1]):
        match = _NECK_CONV.fullmatch(name.removeprefix(_NECK[1]))
        return f"{_NECK[0]}{match[1]}.{match[2]}" if match else name
    if name.startswith(_GUIDANCE_OF_SEGMENTATION):
        return f"{POSITION}fpe.{name.removeprefix(_GUIDANCE_OF_SEGMENTATION)}"
    swapped = [(theirs, ours) for ours, theirs in _PREFIXES]
    renamed = _replaced(name, swapped)
    return _layer_renamed(renamed, [(theirs, ours) for ours, theirs in _LAYER])


def to_petr_names(name: str, layers: int) -> list[str]:
    """All names in the PETR repository of an entry of ours, none where it has no such entry."""
    if name.startswith(_BACKBONE[0]):
        inside = name.removeprefix(_BACKBONE[0])
        theirs = to_vovnet_name(inside) or inside.removeprefix("model.")
        return [_BACKBONE[1] + theirs]
    if name.startswith(_NECK[0]):
        match = _NECK_CONV.fullmatch(name.removeprefix(_NECK[0]))
        return [f"{_NECK[1]}{match[1]}.conv.{match[2]}"] if match else []
    if name.startswith(_LANES):
        map_class, _, inside = name.removeprefix(_LANES).partition(".")
        short = next((short for short, ours in MAP_CLASSES.items() if ours == map_class), None)
        return [f"{HEAD}lane_branches_{short}.{i}.{inside}" for i in range(layers)] if short else []
    renamed = _layer_renamed(name, _LAYER)
    prefixed = _replaced(renamed, _PREFIXES)
    return [] if prefixed == renamed else [prefixed]


def _replaced(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), name)


def _layer_renamed(name: str, names: Iterable[tuple[str, str]]) -> str:
    """`name`, of ours but for its end, with the part behind "transformer.layers.<number>." renamed by prefix."""
    match = _DECODER_LAYER.fullmatch(name)
    return match[1] + _replaced(match[2], names) if match else name


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal values; NaN equals NaN."""
    return a is b or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))
