"""Trainable parameters of the model that a config describes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from bevctl.config.schema import Config
from bevctl.models.build import build_model, trainable_parameters


@dataclass(frozen=True)
class ParameterCounts:
    """Trainable parameters: their number, and the number of each part by the prefix of its names."""

    trainable: int
    by_part: dict[str, int]


def count_parameters(config: Config) -> ParameterCounts:
    """Count the trainable parameters of `config`'s model, built without weights.

    Raises BevctlError as `build_model` does.
    """
    with _NoRandomValues():
        by_part = trainable_parameters(build_model(without_weights(config)))
    return ParameterCounts(sum(by_part.values()), by_part)


def has_norms_of_batches(config: Config) -> bool:
    """Whether a BatchNorm of `config`'s model follows the batches in training."""
    with _NoRandomValues():
        modules = build_model(without_weights(config)).train().modules()
    return any(isinstance(module, _BatchNorm) and module.training for module in modules)


class _NoRandomValues(TorchFunctionMode):
    """Leaves out random initial values, which take nearly all the time of building a model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.normal_, torch.Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


def without_weights(config: Config) -> Config:
    """`config` whose image backbone is not loaded from a file."""
    camera = config.model.camera
    if camera is None or camera.pretrained is None:
        return config
    model = dataclasses.replace(config.model, camera=dataclasses.replace(camera, pretrained=None))
    return dataclasses.replace(config, model=model)
