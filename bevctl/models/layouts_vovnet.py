"""Names of VoVNet's entries in the files of PETR, and of the backbones that it starts from.

There a convolution is called after its place, `stage3.OSA3_2.layers.0.OSA3_2_0/conv`, slashes and all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_FIRST = "stem.stem_1/conv.weight"
_STEM = re.compile(r"stem\.stem_(\d+)/(conv|norm)\.(\w+)")
_LAYER = re.compile(r"stage(\d+)\.OSA\1_(\d+)\.layers\.(\d+)\.OSA\1_\2_\3/(conv|norm)\.(\w+)")
_CONCAT = re.compile(r"stage(\d+)\.OSA\1_(\d+)\.concat\.OSA\1_\2_concat/(conv|norm)\.(\w+)")
_GATE = re.compile(r"stage(\d+)\.OSA\1_(\d+)\.ese\.(.+)")
_OUR_STEM = re.compile(r"stem\.(\d+)\.(conv|bn)\.(\w+)")
_OUR_BLOCK = re.compile(r"stages\.(\d+)\.(\d+)\.(.+)")
_OUR_LAYER = re.compile(r"layers\.(\d+)\.(conv|bn)\.(\w+)")
_OUR_CONCAT = re.compile(r"concat\.(conv|bn)\.(\w+)")
_OURS = {"conv": "conv", "norm": "bn"}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}
_FIRST_STAGE = 2


def vovnet_prefix(names: Iterable[str]) -> str | None:
    """What stands before a VoVNet's own names among `names`; None where there is none."""
    return next((name.removesuffix(_FIRST) for name in names if name.endswith(_FIRST)), None)


def from_vovnet_name(name: str) -> str | None:
    """Our name of an entry of theirs, both without what stands before the backbone; None for other entries."""
    if match := _STEM.fullmatch(name):
        place, part, rest = match.groups()
        return f"stem.{int(place) - 1}.{_OURS[part]}.{rest}"
    if match := _LAYER.fullmatch(name):
        stage, block, layer, part, rest = match.groups()
        return f"{_our_block(stage, block)}.layers.{layer}.{_OURS[part]}.{rest}"
    if match := _CONCAT.fullmatch(name):
        stage, block, part, rest = match.groups()
        return f"{_our_block(stage, block)}.concat.{_OURS[part]}.{rest}"
    if match := _GATE.fullmatch(name):
        stage, block, rest = match.groups()
        return f"{_our_block(stage, block)}.ese.{rest}"
    return None


def to_vovnet_name(name: str) -> str | None:
    """Inverse of `from_vovnet_name`."""
    if match := _OUR_STEM.fullmatch(name):
        place, part, rest = match.groups()
        return f"stem.stem_{int(place) + 1}/{_THEIRS[part]}.{rest}"
    if (match := _OUR_BLOCK.fullmatch(name)) is None:
        return None
    stage, block = int(match[1]) + _FIRST_STAGE, int(match[2]) + 1
    own, inside = f"OSA{stage}_{block}", match[3]
    if match := _OUR_LAYER.fullmatch(inside):
        layer, part, rest = match.groups()
        return f"stage{stage}.{own}.layers.{layer}.{own}_{layer}/{_THEIRS[part]}.{rest}"
    if match := _OUR_CONCAT.fullmatch(inside):
        part, rest = match.groups()
        return f"stage{stage}.{own}.concat.{own}_concat/{_THEIRS[part]}.{rest}"
    return f"stage{stage}.{own}.{inside}" if inside.startswith("ese.") else None


def _our_block(stage: str, block: str) -> str:
    return f"stages.{int(stage) - _FIRST_STAGE}.{int(block) - 1}"
