"""Boxes as PETR regresses them."""

from __future__ import annotations

import torch
from torch import Tensor

from bevctl.models import box_coder
from bevctl.models.box_coder import BevGrid

_METRES = BevGrid((0.0, 0.0), (1.0, 1.0), (1, 1))


def encode(boxes: Tensor) -> Tensor:
    """(…, 9) boxes → (…, 10) codes: x, y, log w, log l, z of the gravity centre, log h, sin, cos of yaw, vx, vy.

    In m and m/s. The order is that in which upstream's weights give them: width and length change places with the
    height of the centre.
    """
    return _exchanged(box_coder.encode(boxes, _METRES))


def decode(codes: Tensor) -> Tensor:
    """Inverse of `encode`."""
    return box_coder.decode(_exchanged(codes), _METRES)


def _exchanged(codes: Tensor) -> Tensor:
    """Entries 2 and 4 exchanged: z, log l, log w of one code are log w, log l, z of the other."""
    return torch.cat([codes[..., :2], codes[..., 4:5], codes[..., 3:4], codes[..., 2:3], codes[..., 5:]], dim=-1)
