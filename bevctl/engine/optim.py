"""AdamW with per-pattern factors, and its state carried over by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bevctl.config.schema import OptimConfig, ParamGroupConfig
from bevctl.engine.schedule import Schedule
from bevctl.errors import BevctlError

_DEFAULT_GROUP = ParamGroupConfig()


def build_optimizer(model: nn.Module, optim: OptimConfig, lr: float) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters; the first group whose `match` is in a name gives its factors.

    Every torch parameter group carries its parameters' `names` and its `peak_lr`. Raises BevctlError where nothing
    trains.
    """
    # First, so that the rate that is logged is the one without a factor.
    members: dict[ParamGroupConfig, dict[str, nn.Parameter]] = {_DEFAULT_GROUP: {}}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = next((g for g in optim.groups if g.match in name), _DEFAULT_GROUP)
            members.setdefault(group, {})[name] = parameter
    if not any(members.values()):
        raise BevctlError("No parameter is left to train.", "Take some names out of model.freeze.")
    groups = [
        {
            "params": list(parameters.values()),
            "names": list(parameters),
            "peak_lr": lr * group.lr,
            "weight_decay": optim.weight_decay * group.decay,
        }
        for group, parameters in members.items()
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, fused=True)


def unmatched_groups(model: nn.Module, optim: OptimConfig) -> list[str]:
    """Patterns of `optim.groups` that no trainable parameter's name contains."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [group.match for group in optim.groups if not any(group.match in name for name in names)]


def apply_schedule(optimizer: torch.optim.Optimizer, schedule: Schedule, iteration: int) -> float:
    """Sets learning rate and beta1 for the step after `iteration` attempted ones; returns the first group's rate."""
    factor = schedule.lr_factor(iteration)
    beta1 = schedule.optim.betas[0] * schedule.beta1_factor(iteration)
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
        group["betas"] = (beta1, schedule.optim.betas[1])
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


ParameterState = dict[str, Tensor]
"""step, exp_avg and exp_avg_sq of one parameter."""


def load_parameter_states(optimizer: torch.optim.Optimizer, states: Mapping[str, ParameterState]) -> list[str]:
    """Puts saved AdamW states in by parameter name; hyperparameters stay the configured ones.

    Returns the names of parameters that got none, because `states` lacks them or a shape differs.
    """
    fresh = []
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            state = states.get(name)
            if state is None or state["exp_avg"].shape != parameter.shape:
                fresh.append(name)
                continue
            optimizer.state[parameter] = {
                "step": torch.as_tensor(state["step"]).to(parameter.device, torch.float32).reshape(()).clone(),
                "exp_avg": state["exp_avg"].to(parameter.device, parameter.dtype).clone(),
                "exp_avg_sq": state["exp_avg_sq"].to(parameter.device, parameter.dtype).clone(),
            }
    return fresh


def saved_parameter_states(saved: Mapping[str, Any]) -> dict[str, ParameterState]:
    """AdamW states by name from an optimizer state dict whose groups carry `names` (our own checkpoints)."""
    states: dict[str, ParameterState] = {}
    for group in saved["param_groups"]:
        for name, index in zip(group["names"], group["params"], strict=True):
            if index in saved["state"]:
                states[name] = saved["state"][index]
    return states
