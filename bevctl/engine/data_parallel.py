"""DistributedDataParallel as a run wants it: buckets, their number format, and what it may rely on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bevctl.config.schema import TrainConfig
from bevctl.engine.dist import World

_COMPRESSION: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def data_parallel(model: nn.Module, world: World, device: torch.device, train: TrainConfig) -> nn.Module:
    """`model` itself alone, or DDP around it; BatchNorm statistics stay each rank's own (see `broadcast_buffers`).

    Gradients are views of the buckets that are exchanged. The graph is taken to be the same in every step, so that
    nothing is searched for; with `train.accumulate` above 1 it is not, as steps without an exchange differ.
    """
    if world.size == 1:
        return model
    wrapper = nn.parallel.DistributedDataParallel
    renamed = "forward_sync_buffers" in inspect.signature(wrapper).parameters  # torch 2.14 deprecates the old name
    unsynchronised: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    wrapped = wrapper(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=train.static_graph and train.accumulate == 1,
        bucket_cap_mb=train.bucket_mb,
        **unsynchronised,
    )
    if train.gradient_compression != "none":
        wrapped.register_comm_hook(None, _COMPRESSION[train.gradient_compression])
    return wrapped
