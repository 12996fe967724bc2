"""Faster forms of the parts of a model whose shapes never change, as the config asks for them."""

from __future__ import annotations

import torch
from torch import nn

from bevctl.config.schema import Config
from bevctl.engine.compilation import compile_parts
from bevctl.engine.cuda_graphs import record_parts
from bevctl.engine.dist import World
from bevctl.engine.stand_in import Report
from bevctl.models.build import static_parts


def accelerate(model: nn.Module, config: Config, world: World, device: torch.device, report: Report) -> None:
    """Compiles (`train.compile`) and records as CUDA graphs (`train.cuda_graphs`) what can be, in place.

    `report` gets a sentence about what is compiled, and one about each part that cannot be.
    """
    if config.train.compile:
        compiled = compile_parts(model, static_parts(config.model, for_compiler=True), report)
        report(f"torch.compile for {', '.join(compiled) or 'nothing'}: the first step takes longer")
    # Normalisation over all ranks waits for them inside the part.
    synchronised = config.train.sync_bn and world.size > 1
    if config.train.cuda_graphs and device.type == "cuda" and not synchronised:
        record_parts(model, static_parts(config.model), report)
