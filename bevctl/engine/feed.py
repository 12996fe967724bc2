"""Batches on their way to the device."""

from __future__ import annotations

import torch

from bevctl.batch import SomeBatch


class Feed:
    """Moves batches to `device`; to a GPU beside the kernels of the step before, which the host runs ahead of.

    The batch must be in page-locked memory for that; whatever is launched afterwards waits for it on the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: SomeBatch) -> SomeBatch:
        if self._stream is None:
            return batch.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = batch.to(self._device, non_blocking=True)
        present = torch.cuda.current_stream(self._device)
        present.wait_stream(self._stream)
        moved.map_tensors(lambda tensor: _used_by(tensor, present))
        return moved


def _used_by(tensor: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
    """Tells the allocator that `stream` reads `tensor`, so that its memory is not given away before."""
    tensor.record_stream(stream)
    return tensor
