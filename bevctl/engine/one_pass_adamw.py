"""Norm and update of all parameters in a few kernels: torch's own go over lists of tensors, in dozens of launches."""

from __future__ import annotations

import itertools
import math

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
        self._chunks: _Chunks | None = None
        self._table = torch.empty(0, dtype=torch.int64)

    def prepare(self) -> bool:
        """Looks at this step's gradients; False where the kernels cannot do this step.

        Raises:
            BevctlError: Triton is asked for and cannot run here.
        """
        if not self._parameters or not use_triton(self._parameters[0]):
            return False
        rows = [self._row(p) for p in self._parameters]
        if any(row is None for row in rows):
            return False
        addresses = list(itertools.chain.from_iterable(zip(*(row for row in rows if row is not None), strict=True)))
        self._table = to_device(torch.tensor(addresses, dtype=torch.int64), self._parameters[0].device)
        if self._chunks is None:
            self._chunks = _Chunks([p.numel() for p in self._parameters], self._parameters[0].device)
        return True

    def _row(self, parameter: nn.Parameter) -> tuple[int, ...] | None:
        """Addresses of a parameter's tensors, or None where they do not lie alike."""
        state = self._optimizer.state.get(parameter)
        if not state or parameter.dtype != torch.float32 or state["step"].is_cuda != parameter.is_cuda:
            return None
        tensors = [parameter, state["exp_avg"], state["exp_avg_sq"]]
        tensors += [] if parameter.grad is None else [parameter.grad]
        if any(t.stride() != parameter.stride() or t.dtype != torch.float32 for t in tensors):
            return None
        gradient = 0 if parameter.grad is None else parameter.grad.data_ptr()
        averages = state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()
        return parameter.data_ptr(), gradient, *averages, state["step"].data_ptr()

    def norms(self, inverse_scale: Tensor) -> Tensor:
        """(N,) L2 norm of each parameter's gradient times `inverse_scale` (0-dimensional), 0 where it has none."""
        from bevctl.ops.kernels.adamw import CHUNK, norms_kernel, square_sums_kernel
        from bevctl.ops.kernels.launch import launch

        chunks, count = self._chunks, len(self._parameters)
        assert chunks is not None, "prepare comes first"
        sums = torch.empty(len(chunks.owner), device=self._table.device)
        norms = torch.empty(count, device=self._table.device)
        table, owner, start, sizes = self._table, chunks.owner, chunks.start, chunks.sizes
        launch(square_sums_kernel, (len(owner),), table, owner, start, sizes, inverse_scale, sums, count, CHUNK=CHUNK)
        launch(norms_kernel, (count,), sums, chunks.first, norms, BLOCK=128)
        return norms

    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        """One step with the gradients times `factor`; nothing changes where `found_inf` is not 0 (0-dimensional)."""
        from bevctl.ops.kernels.adamw import CHUNK, adamw_kernel, advance_kernel
        from bevctl.ops.kernels.launch import launch

        chunks, count, device = self._chunks, len(self._parameters), self._table.device
        assert chunks is not None, "prepare comes first"
        settings, logarithms, rates = self._settings()
        corrections = torch.empty(2 * count, device=device)
        table, owner, start, sizes = self._table, chunks.owner, chunks.start, chunks.sizes
        grid = (-(-count // 128),)
        launch(advance_kernel, grid, table, found_inf, *logarithms, corrections, count, BLOCK=128)
        numbers = (rates, settings, corrections, factor, found_inf, count)
        launch(adamw_kernel, (len(owner),), table, owner, start, sizes, *numbers, CHUNK=CHUNK)

    def _settings(self) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Betas and epsilon, logarithms of the betas in float64, and rates by parameter, in one transfer."""
        groups = self._optimizer.param_groups
        beta1, beta2 = groups[0]["betas"]
        settings = [beta1, 1 - beta1, beta2, 1 - beta2, groups[0]["eps"]]
        rates = [group["lr"] for group in groups for _ in group["params"]]
        decays = [group["weight_decay"] for group in groups for _ in group["params"]]
        numbers = torch.tensor([math.log(beta1), math.log(beta2), *settings, *rates, *decays], dtype=torch.float64)
        moved = to_device(numbers, self._table.device)
        others = moved[2:].float()
        return others[:5], moved[:2].split(1), others[5:]


class _Chunks:
    """How parameters are cut up, on the device: (C,) owner and start, (N,) sizes, (N + 1,) first chunk of each."""

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        from bevctl.ops.kernels.adamw import CHUNK

        counts = [-(-size // CHUNK) for size in sizes]
        owner = [index for index, count in enumerate(counts) for _ in range(count)]
        start = [CHUNK * number for count in counts for number in range(count)]
        self.owner, self.start, self.sizes, self.first = (
            to_device(torch.tensor(values, dtype=torch.int64), device)
            for values in (owner, start, sizes, [0, *itertools.accumulate(counts)])
        )
