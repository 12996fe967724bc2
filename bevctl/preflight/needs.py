"""What a run needs at the least, as far as its config tells before anything was built on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from bevctl.preflight.checks import Context
from bevctl.preflight.gpu_selection import gpus_in_use

_STATE_COPIES = 4
"""FP32 numbers a parameter on the GPU: weight, gradient and AdamW's two averages."""
_SAVED_COPIES = 3
"""FP32 numbers a parameter in a checkpoint: weight and AdamW's two averages."""
CUDA_CONTEXT = 2**29
"""Bytes that CUDA and its libraries take before the first tensor."""


_SAMPLES = 6
"""Samples looked at for their size."""


class NotKnown(Exception):
    """The need follows from a config, and there is none to read."""


def parameters(context: Context) -> int:
    """Trainable parameters of the config's model. Raises NotKnown without a config, or where it cannot be built."""
    if context.config is None:
        raise NotKnown("no config of ours to count the parameters of")
    from bevctl.errors import BevctlError
    from bevctl.measure.parameters import count_parameters

    try:
        return count_parameters(context.config).trainable
    except BevctlError as error:
        raise NotKnown(error.message) from error


def gpu_state_bytes(context: Context) -> int:
    """Lower bound of a GPU's memory: weights, gradients, optimizer state and CUDA; activations come on top."""
    return _STATE_COPIES * 4 * context.once(parameters) + CUDA_CONTEXT


@dataclass(frozen=True)
class StepNeed:
    """Bytes of the device that training takes, as `bevctl memory` predicts them."""

    typical: int
    large: int
    """With samples of the 99th percentile."""


def step_bytes(context: Context) -> StepNeed:
    """What a step of the run takes. Raises NotKnown where it cannot be predicted."""
    config = context.config
    if config is None:
        raise NotKnown("no config of ours to trace")
    from bevctl.errors import BevctlError
    from bevctl.measure.memory import Predictor
    from bevctl.measure.memory_inputs import sample_sizes
    from bevctl.ops import backend

    model = config.model
    precision = "fp16" if context.precision == "auto" else context.precision
    try:
        sizes = sample_sizes(config, most=_SAMPLES)
        with backend.forced("torch") if _without_kernels(context) else contextlib.nullcontext():
            typical, large = (
                Predictor(config, size, context.gpus or 1).need(precision, context.batch, model.checkpointing).device
                for size in (sizes.typical, sizes.p99)
            )
    except BevctlError as error:
        raise NotKnown(error.message) from error
    return StepNeed(typical, large)


def _without_kernels(context: Context) -> bool:
    """Whether a GPU of the run is too old for the kernels (a V100), whose place plain torch takes."""
    from bevctl.ops.backend import MINIMUM_CAPABILITY

    capabilities = [gpu.capability for gpu in context.once(gpus_in_use).used]
    return any(isinstance(found, tuple) and found < MINIMUM_CAPABILITY for found in capabilities)


def checkpoint_bytes(context: Context) -> int:
    """Size of a checkpoint: of the newest in the work_dir, else what weights and optimizer state come to."""
    found = sorted(context.work_dir.glob("*.pth"), key=lambda path: path.stat().st_mtime)
    if found:
        return found[-1].stat().st_size
    ema = context.config is not None and context.config.train.ema > 0
    return (_SAVED_COPIES + ema) * 4 * context.once(parameters)


def sample_bytes(context: Context) -> int:
    """One sample as a loading process hands it over. Raises NotKnown without a config."""
    config = context.config
    if config is None:
        raise NotKnown("no config of ours that tells the size of a sample")
    images = points = maps = 0
    if config.model.camera is not None:
        height, width = config.model.camera.image_size
        images = _CAMERAS * config.data.frames * (3 + config.data.image.pad) * height * width
    if config.model.lidar is not None:
        points = (config.data.sweeps + 1) * _POINTS_A_SWEEP * 5 * 4
    if config.model.map is not None:
        (low_x, high_x, step_x), (low_y, high_y, step_y) = config.model.map.xbound, config.model.map.ybound
        cells = round((high_x - low_x) / step_x) * round((high_y - low_y) / step_y)
        maps = len(config.data.map_classes) * cells * 4
    return images + points + maps


_CAMERAS = 6
_POINTS_A_SWEEP = 35_000
"""Points of a nuScenes LiDAR sweep."""
