"""State dicts of Swin transformers alone: the original release's names, and windows of another size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

ORIGINAL_SWIN_NAMES = (
    ("layers.", "stages."),
    ("patch_embed.proj.", "patch_embed.projection."),
    (".attn.", ".attn.w_msa."),
    (".mlp.fc1.", ".ffn.layers.0.0."),
    (".mlp.fc2.", ".ffn.layers.1."),
)


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
