"""Loss scaling whose whole state stays on the device: no host synchronisation in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevctl.config.schema import PrecisionConfig


class LossScaler:
    """Multiplies the loss, divides the gradients, and skips the step where one of them is not finite.

    Same arithmetic and same state dict as torch.amp.GradScaler. Unlike it, a fixed scale keeps the check (1 for BF16
    and FP32), so that in no precision a non-finite gradient reaches the weights.
    """

    def __init__(self, precision: PrecisionConfig, half: bool, device: torch.device) -> None:
        self.dynamic = half and precision.loss_scale == "dynamic"
        fixed = float(precision.loss_scale) if half and not self.dynamic else 1.0
        self.growth_factor = precision.growth_factor
        self.backoff_factor = precision.backoff_factor
        self.growth_interval = precision.growth_interval
        self.value = torch.tensor(precision.init_scale if self.dynamic else fixed, device=device)
        self.found_inf = torch.zeros((), device=device)
        """1.0 when the current step is to be skipped; 0-dimensional as fused AdamW wants it."""
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        """Good steps in a row at the current scale."""
        self._one = torch.ones((), device=device)
        self.ceiling: float | None = None
        """The scale never grows beyond it; None: no limit."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value

    @property
    def inverse(self) -> Tensor:
        """() what takes the scale out of a gradient again."""
        return self.value.double().reciprocal().float()

    def accept(self) -> None:
        """The current step is to be taken, until something is found that speaks against it."""
        self.found_inf.zero_()

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divides the gradients by the scale, and notes whether any of them is not finite."""
        self.accept()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self.inverse)

    def reject_if_nonfinite(self, *values: Tensor) -> None:
        """Skips the step too when one of `values` is not finite.

        Finite gradients can have a norm that overflows, or come from a loss that is not finite.
        """
        torch._amp_foreach_non_finite_check_and_unscale_([torch.stack(values)], self.found_inf, self._one)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """One step of a fused optimizer, which leaves weights and state alone where `found_inf` is set."""
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def lower(self, ceiling: float) -> bool:
        """Keeps the scale, fixed or not, at `ceiling` or below from now on; returns whether that is news."""
        if self.ceiling is not None and self.ceiling <= ceiling:
            return False
        self.ceiling = ceiling
        self.value.clamp_(max=ceiling)
        return True

    def update(self) -> None:
        """Backs off after a skipped step and grows after `growth_interval` good ones; a fixed scale stays."""
        if self.dynamic:
            torch._amp_update_scale_(
                self.value,
                self.growth_tracker,
                self.found_inf,
                self.growth_factor,
                self.backoff_factor,
                self.growth_interval,
            )
        if self.ceiling is not None:
            self.value.clamp_(max=self.ceiling)

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch.amp.GradScaler, and `ceiling` where there is one."""
        limit = {} if self.ceiling is None else {"ceiling": self.ceiling}
        return {
            "scale": self.value.item(),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker.item()),
            **limit,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes scale, growth tracker and ceiling; the factors come from the config. A fixed scale takes the last."""
        if self.dynamic:
            self.value.fill_(float(state["scale"]))
            self.growth_tracker.fill_(int(state["_growth_tracker"]))
        self.ceiling = None
        if "ceiling" in state:
            self.lower(float(state["ceiling"]))


class StatisticsGuard:
    """Undoes what a skipped step did to BatchNorm statistics: one overflowing pass would spoil them for good."""

    def __init__(self, model: nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        flat = [buffer.view(-1) for buffer in buffers]
        self._live = [[b for b in flat if b.dtype == dtype] for dtype in sorted({b.dtype for b in flat}, key=str)]
        """Views of the buffers by type: a kernel takes many tensors at once, but of one type."""
        self._before = [torch.cat(live) for live in self._live]
        self._merged = [torch.empty_like(before) for before in self._before]
        self._pieces = [
            merged.split([buffer.numel() for buffer in live])
            for merged, live in zip(self._merged, self._live, strict=True)
        ]
        """Views of `_merged`, one for each buffer."""

    def remember(self) -> None:
        for live, before in zip(self._live, self._before, strict=True):
            torch.cat(live, out=before)

    def restore(self) -> None:
        """Puts the remembered values back."""
        for live, before, merged, pieces in self._groups():
            merged.copy_(before)
            torch._foreach_copy_(live, pieces)

    def restore_where(self, skipped: Tensor) -> None:
        """Puts the remembered values back where `skipped` (0-dimensional, on the device) is not zero."""
        for live, before, merged, pieces in self._groups():
            torch.where(skipped.bool(), before, torch.cat(live), out=merged)
            torch._foreach_copy_(live, pieces)

    def _groups(self) -> Iterator[tuple[list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]]:
        return zip(self._live, self._before, self._merged, self._pieces, strict=True)
