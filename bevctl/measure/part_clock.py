"""Where the time of a training step goes, by part of the model, forward and backward, without changing the step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Instant = float | torch.cuda.Event
REST = "rest"
"""What runs inside the model and in none of its parts."""


def now(device: torch.device) -> Instant:
    """This instant in the work that was given to `device`."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Instant, end: Instant) -> float:
    """Seconds from one `now` to a later one of the same device, which must have come there."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float)
    assert isinstance(end, float)
    return end - start


class PartClock:
    """Notes when each part of `model` starts and ends: CUDA events on a GPU, the wall clock on a CPU.

    Each instant carries the name of what starts there, so that the times of a step add up to the whole step:
    `data` (until the model is called), `forward/<part>`, `forward/<task> loss`, `backward/<task> loss`,
    `backward/<part>`, `optimizer` (from the end of the backward pass). Names of parts are those of submodules.

    The backward pass of a part starts when the gradient of its output is there; what lies between two parts counts
    to the later one.
    """

    def __init__(self, model: nn.Module, parts: Sequence[str], device: torch.device) -> None:
        self._model, self._parts, self._device = model, parts, device
        self._marks: list[_Mark] = []
        self._steps: list[list[_Mark]] = []
        self._in_backward = self._end_awaited = False

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on the model for as long as the block runs."""
        handles: list[Any] = [
            self._model.register_forward_pre_hook(lambda *_: self._enter(f"forward/{REST}")),
            self._model.register_forward_hook(lambda _, __, losses: self._leave_model(losses)),
        ]
        for part in self._parts:
            module = self._model.get_submodule(part)
            handles.append(module.register_forward_pre_hook(lambda *_, part=part: self._enter(f"forward/{part}")))
            handles.append(module.register_forward_hook(lambda _, __, out, part=part: self._leave(part, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One training step."""
        self._marks = []
        self._mark("data")
        yield
        self._mark("end")
        self._steps.append(self._marks)

    def seconds(self) -> list[dict[str, float]]:
        """Time by name of every step so far; waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [_durations([(mark.name, mark.instant) for mark in marks]) for marks in self._steps]

    def host_seconds(self) -> list[dict[str, float]]:
        """The same of the host, which launches a GPU's work ahead of it."""
        return [_durations([(mark.name, mark.host) for mark in marks]) for marks in self._steps]

    def _mark(self, name: str) -> None:
        self._marks.append(_Mark(name, now(self._device), time.perf_counter()))

    def _enter(self, name: str) -> None:
        if not self._in_backward:  # where activations are recomputed, parts run again there
            self._mark(name)

    def _leave(self, part: str, output: Any) -> None:
        if self._in_backward:
            return
        task = part.removeprefix("heads.")
        self._enter(f"forward/{task} loss" if task != part else f"forward/{REST}")
        self._when_gradient_comes(_tensors(output), f"backward/{part}")

    def _leave_model(self, losses: dict[str, Tensor]) -> None:
        for task in dict.fromkeys(name.split("/")[1] for name in losses if name.startswith("loss/")):
            values = (value for name, value in losses.items() if name.startswith(f"loss/{task}/"))
            self._when_gradient_comes(values, f"backward/{task} loss")
        self._in_backward = True
        self._mark(f"backward/{REST}")

    def _when_gradient_comes(self, tensors: Iterable[Tensor], name: str) -> None:
        """Marks `name` once, when the first of the gradients of `tensors` is known."""
        pending = [name]

        def arrived(*_: Any) -> None:
            if pending:
                self._mark(pending.pop())
                self._note_end_of_backward()

        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(arrived)

    def _note_end_of_backward(self) -> None:
        """Marks the optimizer's start when the running backward pass is over; to be called inside it."""
        if self._end_awaited:
            return
        self._end_awaited = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._leave_backward)

    def _leave_backward(self) -> None:
        self._in_backward = self._end_awaited = False
        self._mark("optimizer")


@dataclass(frozen=True)
class _Mark:
    """What starts, when it does on the device, and when the host came there."""

    name: str
    instant: Instant
    host: float


def _durations(marks: Sequence[tuple[str, Instant]]) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for (name, start), (_, end) in itertools.pairwise(marks):
        times[name] += seconds_between(start, end)
    return dict(times)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a tensor, list, tuple, dict or dataclass."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors([getattr(value, f.name) for f in dataclasses.fields(value)])
