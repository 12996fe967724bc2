"""The GPU memory that a run is going to take, for a dry run: one trace, a few seconds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bevctl.config.schema import Config
from bevctl.engine.precision import resolve_precision
from bevctl.measure.memory import Need, predict, running_on
from bevctl.measure.memory_inputs import sample_sizes
from bevctl.sizes import format_gib

_SAMPLES = 2
"""Samples looked at for their size: reading them is half of the time."""


@dataclass(frozen=True)
class Expected:
    """The prediction of `bevctl memory` for the config as it is, and what the GPU here has of it."""

    need: Need
    card: int | None
    """Bytes of the GPU; None where there is none."""

    def sentence(self) -> str:
        device = f"{format_gib(self.need.device)} on the device, as nvidia-smi shows it"
        has = f"the GPU has {format_gib(self.card)}" if self.card is not None else "there is no GPU here"
        return f"{format_gib(self.need.allocated)} allocated at the peak, {device} (predicted); {has}"

    def document(self) -> dict[str, int | None]:
        need = self.need
        sizes = {"allocated_bytes": need.allocated, "reserved_bytes": need.reserved, "device_bytes": need.device}
        return {**sizes, "card_bytes": self.card}


def expected_memory(config: Config, device: torch.device, gpus: int) -> Expected:
    """What training `config` on `device` takes with samples of usual size; on a GPU like none where it is a CPU.

    Args:
        gpus: of the whole run.

    Raises:
        BevctlError: the data set cannot be read, or nothing can be predicted (exit code 3).
    """
    card = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    asked = config.precision.dtype
    precision = resolve_precision(asked, device).name if card is not None or asked != "auto" else "fp16"
    sizes = [sample_sizes(config, most=_SAMPLES).typical] * config.train.batch
    with running_on():
        return Expected(predict(config, precision, sizes, gpus), card)
