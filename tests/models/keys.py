"""Recorded state-dict inventories of other projects, read from beside the checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

KEYS = Path(__file__).resolve().parents[3] / "shared" / "reference" / "keys"
needs_keys = pytest.mark.skipif(not KEYS.is_dir(), reason=f"no recorded key lists at {KEYS}")


def inventory(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind (param, buffer, frozen_param…) of every entry of `<name>.tsv`, in file order."""
    entries = {}
    for line in (KEYS / f"{name}.tsv").read_text().splitlines():
        key, shape, kind = line.split("\t")
        entries[key] = (tuple(json.loads(shape)), kind)
    return entries


def empty_state(name: str) -> dict[str, Tensor]:
    """The entries of `<name>.tsv` as tensors without storage."""
    return {key: torch.empty(shape, device="meta") for key, (shape, _) in inventory(name).items()}
