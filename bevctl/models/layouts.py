"""State dicts of other projects, as pure functions between their names and tensors and ours.

Our names are those of mit-bevfusion, so its files need no renaming. mmdet3d ≥ 1.2 uses other prefixes and other names
in the query decoder; spconv 2 stores sparse kernels as (out, x, y, z, in) where ours are (x, y, z, in, out); a file
may also hold an image backbone alone, in the layout of mmdet, of timm, of the original release of Swin, or a VoVNet as
PETR names it. PETRv2's names are ours, and those of the PETR repository stand in `layouts_petr`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bevctl.models import layouts_petr
from bevctl.models.layouts_swin import swin_to_mmdet
from bevctl.models.layouts_vovnet import from_vovnet_name, vovnet_prefix

BACKBONE = "encoders.camera.backbone."
SPARSE_ENCODER = "encoders.lidar.backbone."
TASKS = ("object", "map")
OUR_ROOTS = (
    "encoders.camera.",
    "encoders.lidar.",
    "fuser.",
    "decoder.backbone.",
    "decoder.neck.",
    *(f"decoder.{task}." for task in TASKS),
    "heads.",
)
VIEW_TRANSFORM = "encoders.camera.vtransform."
VIEW_TRANSFORM_ORDER = ("dtransform.", "depthnet.", "downsample.")
"""Order of its modules in mit-bevfusion and mmdet3d; what comes before them is its geometry."""
WRAPPERS = ("module.", "_orig_mod.")

MMDET3D_PREFIXES = (
    (BACKBONE, "img_backbone."),
    ("encoders.camera.neck.", "img_neck."),
    (VIEW_TRANSFORM, "view_transform."),
    (SPARSE_ENCODER, "pts_middle_encoder."),
    ("fuser.", "fusion_layer."),
    ("decoder.backbone.", "pts_backbone."),
    ("decoder.neck.", "pts_neck."),
    ("heads.object.", "bbox_head."),
)
ANY_DETECTORS_HEAD = "bbox_head."
"""Detectors of mmdet and FCOS3D call their heads so too: it tells no layout."""
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


def to_ours(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """A foreign model state under our names and kernel order, and the layout that was recognised.

    The layout is "mit" (our own names), "bevctl" (those of a model that only bevctl has), "mmdet3d", "petr",
    "mmdet_backbone", "swin_backbone", "vovnet_backbone" (an image backbone alone, given the backbone's place in our
    model) or "unknown" (names returned as they came). Entries that have no place in our model (a detector's other
    parts, classification heads) are left out. Tensors are shared with `state` unless reordered.

    Raises BevctlError where entries differ that are one.
    """
    bare = {unwrapped(key): value for key, value in state.items()}
    layout = recognise(bare)
    if layout == "mmdet3d":
        bare = {_from_mmdet3d(key): value for key, value in bare.items()}
    elif layout == "petr":
        bare = layouts_petr.from_petr(bare)
    elif layout == "mmdet_backbone":
        bare = {BACKBONE + key: value for key, value in _backbone_part(bare).items()}
    elif layout == "swin_backbone":
        bare = {BACKBONE + key: value for key, value in swin_to_mmdet(_backbone_part(bare)).items()}
    elif layout == "vovnet_backbone":
        bare = _vovnet_part(bare)
    return _sparse_kernels_xyz_in_out(bare), layout


def recognise(names: Iterable[str]) -> str:
    """Layout of a state dict with these names (without wrapper prefixes); the values are those of `to_ours`."""
    keys = list(names)
    if family(keys) == "petrv2":
        return "bevctl"
    if any(key.startswith(OUR_ROOTS) for key in keys):
        return "mit"
    if any(key.startswith(layouts_petr.ROOTS) for key in keys):
        return "petr"
    if vovnet_prefix(keys) is not None:
        return "vovnet_backbone"
    if any(key.startswith(theirs) for key in keys for _, theirs in MMDET3D_PREFIXES if theirs != ANY_DETECTORS_HEAD):
        return "mmdet3d"
    backbone = [key.removeprefix("backbone.") for key in keys]
    if any(key.startswith("stages.") and ".w_msa." in key for key in backbone):
        return "mmdet_backbone"
    if any(key.startswith("layers.") and ".attn.qkv." in key for key in backbone):
        return "swin_backbone"
    return "unknown"


def family(names: Iterable[str]) -> str:
    """The model family of a state with these names of ours: petrv2 or bevfusion, empty for an image backbone alone."""
    keys = list(names)
    if any(key.startswith(layouts_petr.POSITION) for key in keys):
        return "petrv2"
    return "" if all(key.startswith(BACKBONE) for key in keys) else "bevfusion"


def our_name(key: str, layout: str) -> str:
    """Our name of an entry, without wrapper prefixes, of a model in the layout bevctl, mit, mmdet3d or petr."""
    if layout == "petr":
        return layouts_petr.from_petr_name(key)
    return _from_mmdet3d(key) if layout == "mmdet3d" else key


def distinct(names: Iterable[str]) -> list[str]:
    """The names of another project's entries without those that are one with an earlier one."""
    bare = {name: unwrapped(name) for name in names}
    layout = recognise(bare.values())
    first: dict[str, str] = {}
    for name, inside in bare.items():
        first.setdefault(our_name(inside, layout), name)
    return list(first.values())


def to_petr(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state of a PETRv2 with one head as the PETR repository's tools load it: their names and boxes.

    Raises ValueError for a state with both heads (see `of_task`).
    """
    return layouts_petr.to_petr(exchange_box_convention(state))


def to_mit(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state as mit-bevfusion's tools load it: one decoder, its boxes, its order of modules.

    Raises ValueError for a state with a decoder for each task (see `of_task`).
    """
    if tasks(state):
        raise ValueError("a model of mit-bevfusion has one decoder")
    return exchange_box_convention(in_their_order(state))


def to_mmdet3d(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state under mmdet3d's names and in its order; what mmdet3d has no part for (the map head) is left out.

    Kernels keep our order (x, y, z, in, out): mmcv's operators use it, and mmdet3d itself turns it into spconv 2's.
    Raises ValueError for a state with a decoder for each task (see `of_task`).
    """
    if tasks(state):
        raise ValueError("a model of mmdet3d has one decoder")
    renamed = ((mmdet3d_name(key), key, value) for key, value in in_their_order(state).items())
    return {theirs: value for theirs, ours, value in renamed if theirs != ours}


def in_their_order(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state in the order in which the other projects' models register their modules."""

    def rank(key: str) -> int:
        inside = key.removeprefix(VIEW_TRANSFORM)
        return next((i for i, part in enumerate(VIEW_TRANSFORM_ORDER, 1) if inside.startswith(part)), 0)

    keys = list(state)
    places = [place for place, key in enumerate(keys) if key.startswith(VIEW_TRANSFORM)]
    for place, key in zip(places, sorted((keys[place] for place in places), key=rank), strict=True):
        keys[place] = key
    return {key: state[key] for key in keys}


def tasks(names: Iterable[str]) -> list[str]:
    """The tasks that have a decoder of their own, by our names."""
    inside = [key.split(".")[1:3] for key in names if key.startswith("decoder.")]
    return list(dict.fromkeys(parts[0] for parts in inside if parts[0] in TASKS))


def of_task(state: Mapping[str, Tensor], task: str) -> dict[str, Tensor]:
    """Our state without the other tasks' heads and decoders, as a model of this task alone has it."""
    own = f"decoder.{task}."
    others = tuple(f"decoder.{name}." for name in tasks(state) if name != task)
    return {
        key.replace(own, "decoder.", 1) if key.startswith(own) else key: value
        for key, value in state.items()
        if not key.startswith(others) and (not key.startswith("heads.") or key.startswith(f"heads.{task}."))
    }


def match_decoders(state: Mapping[str, Tensor], model_names: Iterable[str]) -> dict[str, Tensor]:
    """Our state with its one decoder given to each task of a model that has a decoder for each."""
    wanted = tasks(model_names)
    if not wanted or tasks(state):
        return dict(state)
    matched = {}
    for key, value in state.items():
        inside = key.removeprefix("decoder.")
        names = [f"decoder.{task}.{inside}" for task in wanted] if inside != key else [key]
        matched.update(dict.fromkeys(names, value))
    return matched


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


def _vovnet_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a VoVNet under our names, from a file of the backbone or of a detector around it."""
    prefix = vovnet_prefix(state) or ""
    inside = ((from_vovnet_name(key.removeprefix(prefix)), value) for key, value in state.items())
    return {BACKBONE + name: value for name, value in inside if name is not None}


def _sparse_kernels_xyz_in_out(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sparse kernels moved from spconv 2's (out, x, y, z, in), told by the shape of the first one."""
    first = state.get(SPARSE_ENCODER + "conv_input.0.weight")
    if first is None or tuple(first.shape[:3]) == (3, 3, 3):
        return state
    return {
        key: value.permute(1, 2, 3, 4, 0).contiguous() if key.startswith(SPARSE_ENCODER) and value.dim() == 5 else value
        for key, value in state.items()
    }


_LEGACY_ROWS = (
    (".prediction_heads.", ".dim.1.", (1, 0, 2), 1),
    (".prediction_heads.", ".rot.1.", (1, 0), -1),
    (".reg_branches.", ".task_heads.3.2.", (1, 0), -1),
)
"""Last layers that speak of sizes and yaw: parts of their names, and the order and the sign of rows elsewhere.

PETR's code names width before length in both conventions.
"""


def exchange_box_convention(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state whose detection head predicts mit-bevfusion's and PETR's boxes, made to predict ours; or the other way
    round.

    There boxes are (w, l, h) with a yaw of −yaw − π/2: the rows of width and length change places, and so do sine and
    cosine, both negated. What the height means (`model.object.box_z`) is no linear map and stays as it is.
    """
    converted = dict(state)
    for key, value in state.items():
        for head, branch, rows, sign in _LEGACY_ROWS:
            if head in key and branch in key:
                moved = value[torch.tensor(rows)]
                converted[key] = -moved if sign < 0 else moved
    return converted
