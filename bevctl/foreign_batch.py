"""Batches whose inside only another project's code reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForeignBatch:
    """What another project's data set gives its own model, which also moves it to the device."""

    content: Any
    """As its collate function made it; None where not one sample could be read."""
    tokens: list[str]
    """Sample tokens (or other stable ids)."""
    problems: list[str] = field(default_factory=list)
    """One sentence for each unreadable file met while the batch was made."""

    @property
    def size(self) -> int:
        return len(self.tokens)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> ForeignBatch:
        """Itself: `content` is left to the model that it is for."""
        del change
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> ForeignBatch:
        """Itself, as `map_tensors`."""
        del device, non_blocking
        return self

    def pin_memory(self) -> ForeignBatch:
        """Itself, as `map_tensors`."""
        return self
