"""The memory that training a config takes on a GPU: what of it is what, at its peak, predicted without one.

Two numbers cannot be traced and are calibrated on measurements: what libraries take inside their operations, and
what CUDA itself takes beside torch's allocator.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from bevctl.config.schema import Config
from bevctl.errors import BevctlError, ExitCode
from bevctl.measure.memory_places import GRADIENTS
from bevctl.measure.memory_trace import SampleSize, StepMemory, trace_step
from bevctl.ops import backend

WORKSPACE_SHARE = 0.07
"""Workspaces and temporary copies of cuDNN, over everything that the trace counts; from measurements, see BASIS.

What is needed, and not what is taken in FP32 without TF32 (before capability 8.0, or switched off). There the fastest
algorithms transform whole maps (FFT, Winograd) and want as much as there is: 7 GiB at batch 4 of the detection model,
four times that while they are tried. None of it ends a run: PyTorch tries what fits into the free memory, halves it on
failure, gives it back, and searches anew where it is refused later (aten/src/ATen/native/cudnn/Conv_v8.cpp).
"""
CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes that cuBLAS keeps for each thread and stream on capability 9.0 and newer; 8 MiB before."""
_THREADS = 2
"""That use cuBLAS: the training's own, and autograd's."""
CUDA_CONTEXT = {"fp16": 2**30, "bf16": 2**30, "fp32": 2 * 2**30}
"""Bytes that CUDA, its libraries and loaded kernels take outside torch's allocator. On an H200: 0.84 to 1.03 GiB in
FP16, and 1.91 to 2.00 GiB in FP32, for which cuDNN loads and tries more kernels."""
_TRACED_AS = {"fp16": "fp16", "bf16": "fp16", "fp32": "fp32"}
"""bf16 takes the bytes of fp16."""
BASIS = (
    "Traced on tensors without contents, through the kernels' own memory; 7 % are added for workspaces of cuDNN. On an "
    "H200 the prediction was 4 % below to 3 % above what the multitask model took in FP16 at batch 1, 4 and 8 and in "
    "FP32 at batch 1, with all parts recomputed and without, and 11 % below what the detection model took in FP32 at "
    "batch 4. Without TF32, cuDNN takes more where there is room. Other cards and several GPUs have not been compared."
)
_ADAM_COPIES = 2
BUCKETS, NCCL, CONTEXT = "gradient buckets (DDP)", "NCCL", "CUDA context"
NCCL_BYTES = 300 * 2**20
"""Bytes of NCCL's channels and kernels, outside torch's allocator; not measured, what is usual on one machine."""


@dataclass(frozen=True)
class Need:
    """Bytes at the peak of a step, and what they consist of."""

    components: dict[str, int]
    """Those inside of torch add up to `allocated`; CONTEXT and NCCL lie beside it."""
    allocated: int
    """In tensors and in the pools of CUDA graphs; torch.cuda.max_memory_allocated leaves the pools out."""
    reserved: int
    """What torch's allocator holds; torch.cuda.max_memory_reserved."""
    device: int
    """What nvidia-smi shows for the process."""


def need_of(config: Config, step: StepMemory, precision: str, gpus: int = 1) -> Need:
    """A step traced in `precision`, with the optimizer and with what no trace sees.

    Args:
        gpus: with several, gradients lie in buckets of their size, which stay.
    """
    states = {
        "parameters": step.parameters,
        "optimizer": _ADAM_COPIES * step.learning,
        "buffers": step.buffers,
        **({"weight average": step.parameters} if config.train.ema else {}),
        **({BUCKETS: step.learning} if gpus > 1 else {}),
    }
    parts = dict(sorted(step.by_part.items(), key=lambda item: -item[1]))
    in_buckets = min(parts.get(GRADIENTS, 0), step.learning) if gpus > 1 else 0
    if in_buckets:
        parts[GRADIENTS] -= in_buckets
    # Recorded parts were warmed up and recorded on streams of their own.
    streams = 3 if step.pools else 1
    workspace = round(WORKSPACE_SHARE * step.peak) + _THREADS * streams * CUBLAS_WORKSPACE
    outside = {CONTEXT: CUDA_CONTEXT[precision], **({NCCL: NCCL_BYTES} if gpus > 1 else {})}
    components = {**states, **parts, "workspace": workspace, **outside}
    more = sum(states.values()) + workspace - in_buckets
    reserved = more + step.reserved
    return Need(components, more + step.peak, reserved, reserved + sum(outside.values()))


def running_on(kernels: str = "auto") -> AbstractContextManager[None]:
    """Predictions inside are for these kernels: auto (those of the GPU here, else Triton's), torch or triton."""
    if kernels == "auto" and torch.cuda.is_available() and not backend.is_plain():
        kernels = "auto" if backend.reason(torch.device("cuda")).startswith("Triton") else "torch"
    return contextlib.nullcontext() if kernels == "auto" else backend.forced(kernels)


def predict(config: Config, precision: str, sizes: Sequence[SampleSize], gpus: int = 1) -> Need:
    """The peak of a step in fp16, bf16 or fp32 on one sample of each of `sizes`, of a run on `gpus` GPUs.

    Raises:
        BevctlError: Triton is not installed (exit code 3).
    """
    return need_of(config, _trace(config, _TRACED_AS[precision], sizes), precision, gpus)


def _trace(config: Config, precision: str, sizes: Sequence[SampleSize]) -> StepMemory:
    if config.model.mmdet3d is not None:
        raise BevctlError(
            "The memory of a model of mmdet3d is not predicted: its operations are its own.",
            "`bevctl memory CONFIG --engine mmdet3d` on a GPU measures it.",
            ExitCode.UNKNOWN,
        )
    try:
        return trace_step(config, precision, sizes)
    except ModuleNotFoundError as error:
        raise BevctlError(
            f"The memory of a GPU cannot be predicted here: {error.name} is not installed.",
            "Install triton (pip install triton), or measure on a GPU with `bevctl bench`.",
            ExitCode.UNKNOWN,
        ) from error


class Predictor:
    """Predictions for many settings of one config from few traces: memory grows linearly with the batch.

    Args:
        size: of every sample.
        gpus: over which a batch of each is averaged.
    """

    def __init__(self, config: Config, size: SampleSize, gpus: int = 1) -> None:
        self._config, self._size, self._gpus = config, size, gpus
        self._known: dict[tuple[str, tuple[str, ...], int], StepMemory] = {}

    def need(self, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Need:
        """The peak with `batch` samples a step in fp16, bf16 or fp32; traced for one and two samples.

        Raises:
            BevctlError: Triton is not installed (exit code 3).
        """
        model = dataclasses.replace(self._config.model, checkpointing=checkpointing)
        config = dataclasses.replace(self._config, model=model)
        one, two = (self._step(config, _TRACED_AS[precision], count) for count in (1, 2))
        return need_of(config, _extrapolated(one, two, batch), precision, self._gpus)

    def _step(self, config: Config, precision: str, batch: int) -> StepMemory:
        key = (precision, config.model.checkpointing, batch)
        if key not in self._known:
            self._known[key] = _trace(config, precision, [self._size] * batch)
        return self._known[key]


def _extrapolated(one: StepMemory, two: StepMemory, batch: int) -> StepMemory:
    def at(first: int, second: int) -> int:
        return first + (second - first) * (batch - 1)

    names = [*two.by_part, *(name for name in one.by_part if name not in two.by_part)]
    parts = {name: max(0, at(one.by_part.get(name, 0), two.by_part.get(name, 0))) for name in names}
    # The peak is at another moment with one sample than with two, so that parts alone would add up to more.
    peak, total = at(one.peak, two.peak), max(1, sum(parts.values()))
    by_part = {name: size * peak // total for name, size in parts.items()}
    reserved = max(peak, at(one.reserved, two.reserved))
    return dataclasses.replace(one, by_part=by_part, pools=at(one.pools, two.pools), reserved=reserved)
