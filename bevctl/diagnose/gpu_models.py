"""What graphics cards do with FP16, by their name in a log."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuModel:
    """A family of cards."""

    pattern: str
    capability: tuple[int, int]
    tensor_cores: bool = True
    slow_half: bool = False
    """FP16 runs at a fraction of FP32's rate."""

    @property
    def has_bf16(self) -> bool:
        """Whether BF16 runs on tensor cores."""
        return self.capability >= (8, 0)

    @property
    def has_tf32(self) -> bool:
        """Whether FP32 convolutions use tensor cores by default, at half of FP16's rate."""
        return self.capability >= (8, 0)


GPU_MODELS = (
    GpuModel(r"\bM\d+\b|GTX (?:TITAN X|9\d\d)|\bK\d+\b", (5, 2), tensor_cores=False, slow_half=True),
    GpuModel(r"\bP100\b", (6, 0), tensor_cores=False),
    GpuModel(r"\bP40?\b|\bP[456]000\b|GTX 10\d\d|TITAN Xp?\b", (6, 1), tensor_cores=False, slow_half=True),
    GpuModel(r"\bV100|TITAN V\b|\bGV100\b", (7, 0)),
    GpuModel(r"GTX 16\d\d|\bT[1246]00\b", (7, 5), tensor_cores=False),
    GpuModel(r"\bT4\b|RTX 20\d\d|Quadro RTX|TITAN RTX", (7, 5)),
    GpuModel(r"\bA100|\bA800|\bA30\b", (8, 0)),
    GpuModel(r"RTX 30\d\d|\bA10[GM]?\b|\bA40\b|\bA16\b|RTX A\d000", (8, 6)),
    GpuModel(r"RTX 40\d\d|\bL40?S?\b|\bL20\b|RTX \d000 Ada", (8, 9)),
    GpuModel(r"\bH100|\bH200|\bH800|\bH20\b|\bGH200", (9, 0)),
    GpuModel(r"\bB[12]00\b|\bGB200", (10, 0)),
    GpuModel(r"RTX 50\d\d|RTX PRO 6000", (12, 0)),
)
"""Older families first; the first whose pattern is in a name counts."""


def gpu_model(name: str) -> GpuModel | None:
    """The family of a card; None for a name that the table does not know."""
    return next((model for model in GPU_MODELS if re.search(model.pattern, name)), None)
