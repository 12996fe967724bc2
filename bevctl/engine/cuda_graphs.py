"""CUDA graphs for the parts of a model whose shapes never change.

A small batch leaves a GPU waiting for Python: a kernel takes 5 µs to run, and 20 to be asked for. A recorded pass is
asked for once. It works on tensors at fixed addresses, which stay allocated from then on.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bevctl.engine.stand_in import (
    Report,
    StandIn,
    gradients_of,
    state_kept,
    tensors_in,
    with_tensors,
    without_cast_cache,
)
from bevctl.errors import BevctlError, ExitCode

Form = list[tuple[Any, ...]]
"""Shapes and types of tensors."""
_PATIENCE = 3
"""Calls in a row with one other form before that is recorded: the last batch of an epoch is not worth it."""


def form(value: Any) -> Form:
    """What a recording depends on of its inputs."""
    return [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors_in(value)]


def record_parts(model: nn.Module, names: Iterable[str], report: Report) -> list[str]:
    """Lets the modules of `model` called `names`, as far as it has them, run as CUDA graphs while they train.

    Their `forward` is wrapped in place; names of parameters stay. Returns the names found.
    """
    modules = dict(model.named_modules())
    found = [name for name in names if name in modules]
    for name in found:
        modules[name].forward = RecordedForward(name, modules[name], report)
    return found


def recordings(model: nn.Module) -> dict[str, Recording]:
    """What is recorded of `model` so far, by the name of the module."""
    forwards = ((name, vars(module).get("forward")) for name, module in model.named_modules())
    found = ((name, forward.recording) for name, forward in forwards if isinstance(forward, RecordedForward))
    return {name: recording for name, recording in found if recording is not None}


class RecordedForward(StandIn):
    """A module's forward as a CUDA graph; inputs of other shapes run as they are, until they come again and again."""

    kind = "CUDA graphs"

    def __init__(self, name: str, module: nn.Module, report: Report) -> None:
        super().__init__(name, module, report)
        self._inside = list(module.modules())
        self.recording: Recording | None = None
        self._setting: tuple[Any, ...] = ()
        self._others: list[Form] = []

    def run(self, *inputs: Any) -> Any:
        setting = self._current_setting()
        if self.recording is None or setting != self._setting:
            self.recording, self._setting = None, setting  # memory first
            with state_kept(self.module):
                parameters = [p for p in self.module.parameters() if p.requires_grad]
                self.recording = Recording(self.plain, inputs, parameters)
        if self.recording.form == form(inputs):
            self._others = []
            return self.recording.run(inputs)
        self._others = [*self._others, form(inputs)][-_PATIENCE:]
        if self._others == [form(inputs)] * _PATIENCE:
            self.recording = None
            return self.run(*inputs)
        return self.plain(*inputs)

    def _current_setting(self) -> tuple[Any, ...]:
        """What the recorded kernels depend on, beside the inputs: number formats, modes and wrappers of submodules."""
        modules = [vars(module) for module in self._inside]
        wrapped, training = sum("forward" in m for m in modules), sum(m["training"] for m in modules)
        return wrapped, training, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


class Recording:
    """Forward and backward pass of `forward` on inputs like `inputs`, recorded.

    Args:
        forward: function of tensors, nested in lists, tuples or dataclasses, and `parameters`, to the same.
        inputs: its arguments, on a GPU.
        parameters: leaves that get gradients; read where they lie whenever a pass runs.

    Raises:
        RuntimeError: `forward` waits for the device; nothing was recorded.
        BevctlError: the recording failed.
    """

    def __init__(self, forward: Callable[..., Any], inputs: Sequence[Any], parameters: Sequence[Tensor]) -> None:
        self.form = form(inputs)
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors_in(inputs)]
        self.parameters = list(parameters)
        leaves = [t for t in self._inputs if t.requires_grad] + self.parameters
        arguments = with_tensors(list(inputs), iter(self._inputs))
        with without_cast_cache():
            _warm_up(forward, arguments, leaves)
            try:
                result = self._record(forward, arguments, leaves)
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the device's random state stays half recorded
                if (ran_out := _out_of_memory(error)) is not None:
                    raise ran_out from error
                raise BevctlError(
                    f"A part of the model cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}",
                    "Set train.cuda_graphs=false.",
                    ExitCode.RUN_FAILED,
                ) from error
        outputs = list(tensors_in(result))
        self.differentiable = [t.requires_grad for t in outputs]
        self.outputs = [t.detach() for t in outputs]
        self._result = with_tensors(result, iter(self.outputs))
        self.runs = 0

    def _record(self, forward: Callable[..., Any], arguments: Sequence[Any], leaves: Sequence[Tensor]) -> Any:
        """Both graphs, and the tensors at their ends; returns the result of `forward`."""
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Threads that pin memory may go on meanwhile.
        with torch.cuda.graph(self._forward, capture_error_mode="thread_local"):
            result = forward(*arguments)
        ends = [t for t in tensors_in(result) if t.requires_grad]
        self._output_grads = [torch.empty_like(t) for t in ends]
        with torch.cuda.graph(self._backward, pool=self._forward.pool(), capture_error_mode="thread_local"):
            gradients = iter(gradients_of(ends, leaves, self._output_grads))
        self._input_grads = [next(gradients) if t.requires_grad else None for t in self._inputs]
        self._parameter_grads = list(gradients)
        return result

    @property
    def pool(self) -> tuple[int, int]:
        """Where the allocator keeps the tensors of both passes."""
        pool: tuple[int, int] = self._forward.pool()
        return pool

    @property
    def copies(self) -> list[Tensor]:
        """What it keeps outside of `pool`: its inputs, and the gradients of its outputs."""
        return [*self._inputs, *self._output_grads]

    def run(self, inputs: Sequence[Any]) -> Any:
        """The result for `inputs`, valid until the next run."""
        outputs = _Replay.apply(self, *tensors_in(inputs), *self.parameters)
        return with_tensors(self._result, iter(outputs))

    def replay_forward(self, inputs: Sequence[Tensor]) -> None:
        torch._foreach_copy_([t.detach() for t in self._inputs], [t.detach() for t in inputs])
        self._forward.replay()
        self.runs += 1

    def replay_backward(self, output_grads: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of inputs, valid until the next run, and of parameters."""
        torch._foreach_copy_(self._output_grads, list(output_grads))
        self._backward.replay()
        # Gradients of parameters are kept and added up. At the fixed addresses even the next forward pass, whose
        # temporary results share memory with them, would write over them.
        copies = iter(torch._foreach_mul([t for t in self._parameter_grads if t is not None], 1.0))
        return [*self._input_grads, *(None if t is None else next(copies) for t in self._parameter_grads)]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> tuple[Tensor, ...]:
        recording.replay_forward(tensors[: len(tensors) - len(recording.parameters)])
        ctx.recording, ctx.run = recording, recording.runs
        outputs = tuple(t.detach() for t in recording.outputs)
        unchecked = zip(outputs, recording.differentiable, strict=True)
        ctx.mark_non_differentiable(*(t for t, differentiable in unchecked if not differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        recording: Recording = ctx.recording
        if ctx.run != recording.runs:
            raise RuntimeError("a recorded forward pass ran again before the backward pass of its last run")
        wanted = [g for g, differentiable in zip(grads, recording.differentiable, strict=True) if differentiable]
        return None, *recording.replay_backward(wanted)


def _out_of_memory(error: BaseException | None) -> torch.cuda.OutOfMemoryError | None:
    """The want of memory that an error came of: the end of a recording fails too, and covers it."""
    while error is not None and not isinstance(error, torch.cuda.OutOfMemoryError):
        error = error.__context__
    return error


@functools.lru_cache(maxsize=16)
def _warm_up_stream(device: int) -> torch.cuda.Stream:
    """The same for all recordings: cuBLAS keeps a workspace for each thread and stream that it ever ran on."""
    return torch.cuda.Stream(device)


def _warm_up(forward: Callable[..., Any], arguments: Sequence[Any], leaves: Sequence[Tensor]) -> None:
    stream = _warm_up_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for guard in (contextlib.nullcontext(), _without_waiting()):
            with guard:
                ends = [t for t in tensors_in(forward(*arguments)) if t.requires_grad]
                gradients_of(ends, leaves, [torch.zeros_like(t) for t in ends])
    torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def _without_waiting() -> Iterator[None]:
    """Raises RuntimeError where the block waits for the device, which no recording may; trying would break it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any("synchronizing CUDA operation" in str(warning.message) for warning in caught):
        raise RuntimeError("it waits for the device")
