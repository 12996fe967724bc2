"""Norm and update of all parameters in a few kernels: torch's own go over lists of tensors, in dozens of launches."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevctl.ops.backend import use_triton
from bevctl.ops.transfer import to_device


class OnePassAdamW:
    """Does what `torch.optim.AdamW` does, on the state of such an optimizer, where Triton runs.

    Gradients stay as they are: scale and clipping are applied where they are read. It needs the state that the
    optimizer's first own step makes.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
        self._strides = [p.stride() for p in self._parameters]
        self._states: list[dict[str, Any] | None] = []
        self._layout: _Layout | None = None
        self._addresses: list[int] = []
        self._gradients = torch.empty(0, dtype=torch.int64)

    def prepare(self) -> bool:
        """Looks at this step's gradients; False where the kernels cannot do this step.

        Raises:
            BevctlError: Triton is asked for and cannot run here.
        """
        if not self._parameters or not use_triton(self._parameters[0]):
            return False
        states = list(map(self._optimizer.state.get, self._parameters))
        if len(states) != len(self._states) or not all(map(operator.is_, states, self._states)):
            self._states, self._layout = states, None
            if not all(map(_lie_alike, self._parameters, states)):
                return False
            self._layout = _Layout.of(self._optimizer, self._parameters)
        gradients = [p.grad for p in self._parameters]
        if self._layout is None or any(
            g is not None and not _in_order(g, strides) for g, strides in zip(gradients, self._strides, strict=True)
        ):
            return False
        addresses = [0 if g is None else g.data_ptr() for g in gradients]
        if addresses != self._addresses:
            self._addresses = addresses
            self._gradients = to_device(torch.tensor(addresses, dtype=torch.int64), self._layout.table.device)
        return True

    def norms(self, inverse_scale: Tensor) -> Tensor:
        """(N,) L2 norm of each parameter's gradient times `inverse_scale` (0-dimensional), 0 where it has none."""
        from bevctl.ops.kernels.adamw import CHUNK, norms_kernel, square_sums_kernel
        from bevctl.ops.kernels.launch import launch

        at = self._layout
        assert at is not None, "prepare comes first"
        chunks, count = len(at.owner), len(self._parameters)
        sums, norms = (torch.empty(size, device=at.table.device) for size in (chunks, count))
        numbers = (self._gradients, at.owner, at.start, at.sizes, inverse_scale, sums)
        launch(square_sums_kernel, (chunks,), *numbers, CHUNK=CHUNK)
        launch(norms_kernel, (count,), sums, at.first, norms, BLOCK=128)
        return norms

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        """One step with the gradients times `factor`; nothing changes where `found_inf` is not 0 (0-dimensional)."""
        from bevctl.ops.kernels.adamw import CHUNK, adamw_kernel, advance_kernel
        from bevctl.ops.kernels.launch import launch

        at = self._layout
        assert at is not None, "prepare comes first"
        count, table, gradients = len(self._parameters), at.table, self._gradients
        settings = self._settings()
        corrections = torch.empty(2 * count, device=table.device)
        grid = (-(-count // 128),)
        launch(advance_kernel, grid, table, gradients, found_inf, settings, corrections, count, BLOCK=128)
        places = (table, gradients, at.owner, at.start, at.sizes, at.groups)
        numbers = (settings, corrections, factor, found_inf, count)
        launch(adamw_kernel, (len(at.owner),), *places, *numbers, CHUNK=CHUNK)

    def _settings(self) -> Tensor:
        """(7 + 2 G,) float64: log β1, log β2, β1, 1 - β1, β2, 1 - β2, epsilon; rate and decay by group."""
        groups = self._optimizer.param_groups
        beta1, beta2 = groups[0]["betas"]
        numbers = [math.log(beta1), math.log(beta2), beta1, 1 - beta1, beta2, 1 - beta2, groups[0]["eps"]]
        for group in groups:
            numbers += [group["lr"], group["weight_decay"]]
        return to_device(torch.tensor(numbers, dtype=torch.float64), self._gradients.device)


def _lie_alike(parameter: nn.Parameter, state: dict[str, Any] | None) -> bool:
    """Whether a parameter has its state, in float32 and in the same order of memory."""
    if not state or parameter.dtype != torch.float32 or state["step"].is_cuda != parameter.is_cuda:
        return False
    averages = state["exp_avg"], state["exp_avg_sq"]
    return all(a.dtype == torch.float32 and _in_order(a, parameter.stride()) for a in averages)


def _in_order(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether elements follow each other as with `strides`; that of an axis of length 1 moves nothing."""
    own = tensor.stride()
    return own == strides or all(
        length == 1 or stride == other for length, stride, other in zip(tensor.shape, own, strides, strict=True)
    )


@dataclass(frozen=True)
class _Layout:
    """Where everything but the gradients lies, and how it is cut into C chunks; int64 on the device."""

    table: Tensor
    """(4, N) addresses of parameters, both averages and step counts."""
    owner: Tensor
    """(C,) parameter of each chunk."""
    start: Tensor
    """(C,) first element of each chunk."""
    sizes: Tensor
    """(N,) elements of each parameter."""
    first: Tensor
    """(N + 1,) first chunk of each parameter, and C."""
    groups: Tensor
    """(N,) parameter group."""

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> _Layout:
        from bevctl.ops.kernels.adamw import CHUNK

        states = [optimizer.state[p] for p in parameters]
        rows = [[p.data_ptr() for p in parameters]]
        rows += [[state[name].data_ptr() for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        counts = [-(-p.numel() // CHUNK) for p in parameters]
        values: tuple[Any, ...] = (
            rows,
            [index for index, count in enumerate(counts) for _ in range(count)],
            [CHUNK * number for count in counts for number in range(count)],
            [p.numel() for p in parameters],
            [0, *itertools.accumulate(counts)],
            [index for index, group in enumerate(optimizer.param_groups) for _ in group["params"]],
        )
        device = parameters[0].device
        return _Layout(*(to_device(torch.tensor(value, dtype=torch.int64), device) for value in values))
