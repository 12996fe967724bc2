"""Checkpoints go to disk in a thread while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")
_ALIGNMENT = 64


class CheckpointWriter(Generic[_Result]):
    """Keeps the values of a checkpoint's tensors as they are when `start` is called, and writes them later.

    A GPU's tensors are copied to page-locked memory behind the work launched so far, so that the host does not wait for
    it. One checkpoint is written at a time.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[_Result] | None = None
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def has_written(self) -> bool:
        """A checkpoint was written well and `wait` has not told it yet."""
        pending = self._pending
        return pending is not None and pending.done() and pending.exception() is None

    def start(self, content: Mapping[str, Any], write: Callable[[Mapping[str, Any]], _Result]) -> None:
        """Calls `write` in the thread with a copy of `content`; the checkpoint before must have been waited for."""
        assert self._pending is None
        fetch = self._copied(content)
        self._pending = self._thread.submit(lambda: write(fetch()))

    def wait(self) -> _Result | None:
        """What `write` returned, once it is done; None where nothing was started. Raises what `write` raised."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def _copied(self, content: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
        """A function that gives `content` as it is now, with all tensors on the CPU; for another thread to call."""
        on_gpu = [t for t in _tensors(content) if t.is_cuda]
        if not on_gpu:
            copy = _mapped(content, lambda tensor: tensor.detach().clone())
            return lambda: copy
        places = self._stage(on_gpu)
        copied = torch.cuda.Event()
        copied.record()
        kept = _mapped(content, lambda tensor: tensor if tensor.is_cuda else tensor.detach().clone())

        def fetch() -> Mapping[str, Any]:
            copied.synchronize()
            found: Mapping[str, Any] = _mapped(kept, lambda tensor: places.get(id(tensor), tensor).clone())
            return found

        return fetch

    def _stage(self, tensors: list[Tensor]) -> dict[int, Tensor]:
        """Copies of `tensors` in page-locked memory that are on their way, by the tensors' id."""
        sizes = [-(-t.numel() * t.element_size() // _ALIGNMENT) * _ALIGNMENT for t in tensors]
        if self._staging.numel() < sum(sizes):
            self._staging = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        places = {}
        for tensor, part in zip(tensors, self._staging[: sum(sizes)].split(sizes), strict=True):
            host = part[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            places[id(tensor)] = host.copy_(tensor.detach(), non_blocking=True)
        return places


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`value` with every tensor inside dicts, lists and tuples changed; other values are the same objects."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value
