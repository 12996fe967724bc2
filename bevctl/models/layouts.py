"""State dicts of other projects, as pure functions from their names and tensors to ours.

Our names are those of mit-bevfusion, so its files need no renaming. mmdet3d ≥ 1.2 uses other prefixes and other names
in the query decoder; spconv 2 stores sparse kernels as (out, x, y, z, in) where ours are (x, y, z, in, out); a file
may also hold an image backbone alone, in the layout of mmdet or of the original Swin release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

BACKBONE = "encoders.camera.backbone."
SPARSE_ENCODER = "encoders.lidar.backbone."
OUR_ROOTS = ("encoders.camera.", "encoders.lidar.", "fuser.", "decoder.backbone.", "decoder.neck.", "heads.")
WRAPPERS = ("module.", "_orig_mod.")

MMDET3D_PREFIXES = (
    (BACKBONE, "img_backbone."),
    ("encoders.camera.neck.", "img_neck."),
    ("encoders.camera.vtransform.", "view_transform."),
    (SPARSE_ENCODER, "pts_middle_encoder."),
    ("fuser.", "fusion_layer."),
    ("decoder.backbone.", "pts_backbone."),
    ("decoder.neck.", "pts_neck."),
    ("heads.object.", "bbox_head."),
)
EARLY_VIEW_TRANSFORM = "vtransform."
"""Prefix of the view transform in the first converted mmdet3d file."""

MMDET3D_DECODER_LAYER = (
    ("self_attn.", "self_attn.attn."),
    ("multihead_attn.", "cross_attn.attn."),
    ("linear1.", "ffn.layers.0.0."),
    ("linear2.", "ffn.layers.1."),
    ("norm1.", "norms.0."),
    ("norm2.", "norms.1."),
    ("norm3.", "norms.2."),
)

ORIGINAL_SWIN_NAMES = (
    ("layers.", "stages."),
    ("patch_embed.proj.", "patch_embed.projection."),
    (".attn.", ".attn.w_msa."),
    (".mlp.fc1.", ".ffn.layers.0.0."),
    (".mlp.fc2.", ".ffn.layers.1."),
)


def to_ours(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """A foreign model state under our names and kernel order, and the layout that was recognised.

    The layout is "mit" (our own names), "mmdet3d", "mmdet_backbone", "swin_backbone" (both an image backbone alone,
    given the backbone's place in our model), or "unknown" (names returned as they came). Entries that have no place
    in our model (a detector's other parts, classification heads) are left out. Tensors are shared with `state` unless
    reordered.
    """
    bare = {unwrapped(key): value for key, value in state.items()}
    layout = recognise(bare)
    if layout == "mmdet3d":
        bare = {_from_mmdet3d(key): value for key, value in bare.items()}
    elif layout == "mmdet_backbone":
        bare = {BACKBONE + key: value for key, value in _backbone_part(bare).items()}
    elif layout == "swin_backbone":
        bare = {BACKBONE + key: value for key, value in swin_to_mmdet(_backbone_part(bare)).items()}
    return _sparse_kernels_xyz_in_out(bare), layout


def recognise(names: Iterable[str]) -> str:
    """Layout of a state dict with these names (without wrapper prefixes); the values are those of `to_ours`."""
    keys = list(names)
    if any(key.startswith(OUR_ROOTS) for key in keys):
        return "mit"
    if any(key.startswith(theirs) for key in keys for _, theirs in MMDET3D_PREFIXES):
        return "mmdet3d"
    backbone = [key.removeprefix("backbone.") for key in keys]
    if any(key.startswith("stages.") and ".w_msa." in key for key in backbone):
        return "mmdet_backbone"
    if any(key.startswith("layers.") and ".attn.qkv." in key for key in backbone):
        return "swin_backbone"
    return "unknown"


def to_mmdet3d(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state under mmdet3d's names; kernels keep our order (x, y, z, in, out), which mmcv's operators use too."""
    return {mmdet3d_name(key): value for key, value in state.items()}


def mmdet3d_name(key: str) -> str:
    """mmdet3d's name of one of our entries; a name that mmdet3d has no part for (the map head) is unchanged."""
    for ours, theirs in MMDET3D_PREFIXES:
        if key.startswith(ours):
            return theirs + _renamed_decoder(key[len(ours) :], MMDET3D_DECODER_LAYER)
    return key


def _from_mmdet3d(key: str) -> str:
    if key.startswith(EARLY_VIEW_TRANSFORM):
        key = "view_transform." + key[len(EARLY_VIEW_TRANSFORM) :]
    for ours, theirs in MMDET3D_PREFIXES:
        if key.startswith(theirs):
            return ours + _renamed_decoder(key[len(theirs) :], [(b, a) for a, b in MMDET3D_DECODER_LAYER])
    return key


def _renamed_decoder(key: str, names: Iterable[tuple[str, str]]) -> str:
    """`key` of a head with the part behind "decoder.<layer>." renamed by prefix."""
    parts = key.split(".", 2)
    if len(parts) < 3 or parts[0] != "decoder":
        return key
    for old, new in names:
        if parts[2].startswith(old):
            parts[2] = new + parts[2][len(old) :]
            break
    return ".".join(parts)


def unwrapped(key: str) -> str:
    """`key` without what DistributedDataParallel and torch.compile put in front."""
    while key.startswith(WRAPPERS):
        key = key.split(".", 1)[1]
    return key


def _backbone_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of an image backbone, from a file of the backbone or of a detector around it."""
    inside = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
    return inside or dict(state)


def _sparse_kernels_xyz_in_out(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sparse kernels moved from spconv 2's (out, x, y, z, in), told by the shape of the first one."""
    first = state.get(SPARSE_ENCODER + "conv_input.0.weight")
    if first is None or tuple(first.shape[:3]) == (3, 3, 3):
        return state
    return {
        key: value.permute(1, 2, 3, 4, 0).contiguous() if key.startswith(SPARSE_ENCODER) and value.dim() == 5 else value
        for key, value in state.items()
    }


def swin_to_mmdet(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An original Swin state dict under mmdet's names, its patch merging reordered.

    The original concatenates the four pixels of a 2 × 2 patch column by column with channels innermost; mmdet unfolds
    with channels outermost, rows before columns. The classifier, the final norm (mmdet has one per output) and
    attention masks have no counterpart.
    """
    converted = {}
    for key, value in state.items():
        if key.startswith(("head", "norm.")) or key.endswith("attn_mask"):
            continue
        name = key
        for old, new in ORIGINAL_SWIN_NAMES:
            name = name.replace(old, new)
        if ".downsample." in name:
            value = _merged_channels_first(value)
        converted[name] = value
    return converted


def _merged_channels_first(weight: Tensor) -> Tensor:
    """Last axis (4 · C) of patch merging from (column, row, channel) to (channel, row, column)."""
    channels = weight.shape[-1] // 4
    return weight.unflatten(-1, (2, 2, channels)).transpose(-3, -1).flatten(-3)


def match_bias_tables(state: Mapping[str, Tensor], model_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with relative position bias tables resized (bicubic) where the model's window has another size.

    Tables are ((2w − 1)², heads); one whose number of heads differs is left alone.
    """
    matched = dict(state)
    for key, table in state.items():
        target = model_state.get(key)
        if not key.endswith("relative_position_bias_table") or target is None or target.shape == table.shape:
            continue
        if target.shape[1] == table.shape[1]:
            old, new = math.isqrt(table.shape[0]), math.isqrt(target.shape[0])
            image = table.float().T.reshape(1, -1, old, old)
            resized = F.interpolate(image, size=(new, new), mode="bicubic", align_corners=False)
            matched[key] = resized.flatten(2)[0].T.to(table.dtype).contiguous()
    return matched


def legacy_boxes_to_ours(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A detection head trained by mit-bevfusion, made to predict our box convention.

    There boxes are (w, l, h) with a yaw of −yaw − π/2: the rows of width and length change places, and so do sine and
    cosine, both negated. Its heights are gravity centre + h/2, which no linear map undoes: boxes stay h/2 too high
    until the head has been trained on (nuScenes metrics do not look at z).
    """
    converted = dict(state)
    for key, value in state.items():
        if ".prediction_heads." not in key:
            continue
        if ".dim.1." in key:
            converted[key] = value[torch.tensor([1, 0, 2])]
        elif ".rot.1." in key:
            converted[key] = -value[torch.tensor([1, 0])]
    return converted
