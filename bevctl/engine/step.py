"""One attempted optimizer step, from batches to guarded weights; training and the replay of an incident both run it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn

from bevctl.batch import AnyBatch
from bevctl.engine.dist import World
from bevctl.engine.feed import Feed
from bevctl.engine.one_pass_adamw import OnePassAdamW
from bevctl.engine.optim import apply_schedule
from bevctl.engine.precision import Precision
from bevctl.engine.resume import TrainState
from bevctl.engine.scaler import StatisticsGuard
from bevctl.engine.schedule import Schedule


@dataclass(frozen=True)
class StepTensors:
    """Scalars of a step that are still on the device."""

    losses: Mapping[str, Tensor]
    total: Tensor
    grad_norm: Tensor
    """L2 norm of all gradients before clipping, loss scale removed."""
    grad_norms: Mapping[str, Tensor]
    """The same for each part of the model, by name."""
    loss_scale: Tensor
    """The scale the step was made with."""
    growth_tracker: Tensor
    """Good steps in a row at that scale, before this one; float32."""
    skipped: Tensor
    """1 where the step was not finite on some rank, and so changed nothing."""


class TrainStep:
    """Runs steps on the objects of `state`.

    Args:
        network: the model, or DDP around it.
        clip: largest gradient norm; None for no clipping.
        watch: makes a context for each forward pass.
    """

    def __init__(
        self,
        state: TrainState,
        network: nn.Module,
        schedule: Schedule,
        precision: Precision,
        clip: float | None = None,
        world: World = World(),
        watch: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.state = state
        self.network = network
        self.schedule = schedule
        self.precision = precision
        self.clip = clip
        self.world = world
        self.watch = watch
        self.device = state.scaler.value.device
        self._parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
        containers = {name for name, child in state.model.named_children() if isinstance(child, nn.ModuleDict)}
        names = [name for group in state.optimizer.param_groups for name in group["names"]]
        parts = [_part_of(name, containers) for name in names]
        self._parts = list(dict.fromkeys(parts))
        self._membership = torch.tensor([[p == part for p in parts] for part in self._parts], device=self.device)
        """(parts, parameters)"""
        self._present: list[int] = list(range(len(names)))
        """Parameters that had a gradient in the last step."""
        self._members = self._membership
        """The columns of `_membership` for those."""
        self._kernels = OnePassAdamW(state.optimizer)
        self._feed = Feed(self.device)
        self._statistics = StatisticsGuard(state.model)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last step."""
        rate: float = self.state.optimizer.param_groups[0]["lr"]
        return rate

    def run(self, batches: Sequence[AnyBatch], iteration: int) -> StepTensors:
        """One step after `iteration` attempted ones; nothing in it waits for the device."""
        return self.update(self.gradients(batches), iteration)

    def gradients(self, batches: Sequence[AnyBatch]) -> dict[str, Tensor]:
        """Leaves the gradients of the mean loss of `batches`, times the loss scale, in the parameters.

        Returns the mean of each loss. Besides gradients only BatchNorm statistics and random states change; `discard`
        undoes the former.
        """
        self.state.optimizer.zero_grad(set_to_none=True)
        self._statistics.remember()
        parts: list[Tensor] = []
        for position, batch in enumerate(batches, start=1):
            with self._gradients_stay_here(position < len(batches)):
                losses = self._forward(self._feed(batch))
                total = total_loss(losses)
                self.state.scaler.scale(total / len(batches) if len(batches) > 1 else total).backward()
            values = torch.stack([value.detach().float() for value in losses.values()])
            parts.append(values / len(batches) if len(batches) > 1 else values)
        return dict(zip(losses, sum(parts[1:], parts[0]).unbind(), strict=True))

    def discard(self) -> None:
        """Forgets what `gradients` did: weights, optimizer and statistics are those before the step."""
        self.state.optimizer.zero_grad(set_to_none=True)
        self._statistics.restore()

    def update(self, losses: Mapping[str, Tensor], iteration: int) -> StepTensors:
        """Takes the step with the gradients at hand, unless they or the loss are not finite on some rank."""
        scaler, optimizer = self.state.scaler, self.state.optimizer
        in_one_pass = self._kernels.prepare()
        if in_one_pass:
            scaler.accept()
            inverse = scaler.inverse
            grad_norm, grad_norms = self._by_part(self._kernels.norms(inverse), self._membership)
        else:
            scaler.unscale(self._parameters)
            grad_norm, grad_norms = self._clip()
        total = total_loss(losses)
        scaler.reject_if_nonfinite(grad_norm, total)
        if self.world.size > 1:
            distributed.all_reduce(scaler.found_inf, distributed.ReduceOp.MAX)
        apply_schedule(optimizer, self.schedule, iteration)
        if in_one_pass:
            self._kernels.step(inverse * self._clip_factor(grad_norm), scaler.found_inf)
        else:
            scaler.step(optimizer)
        self._statistics.restore_where(scaler.found_inf)
        loss_scale, growth_tracker, skipped = torch.stack(
            (scaler.value, scaler.growth_tracker.float(), scaler.found_inf)
        ).unbind()
        scaler.update()
        if self.state.average is not None:
            self.state.average.update(iteration)
        return StepTensors(losses, total, grad_norm, grad_norms, loss_scale, growth_tracker, skipped)

    def _forward(self, batch: AnyBatch) -> dict[str, Tensor]:
        with self.watch(), self.precision.autocast():
            losses: dict[str, Tensor] = self.network(batch)
        return losses

    def _gradients_stay_here(self, inner: bool) -> AbstractContextManager[None]:
        """Keeps DDP from exchanging gradients before the last batch of a step."""
        if inner and isinstance(self.network, nn.parallel.DistributedDataParallel):
            return self.network.no_sync()
        return contextlib.nullcontext()

    def _clip(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Clips as `nn.utils.clip_grad_norm_` does; returns the norm before, over all and of each part."""
        present = [index for index, p in enumerate(self._parameters) if p.grad is not None]
        if not present:
            return torch.zeros((), device=self.device), {}
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        if present != self._present:
            self._present, self._members = present, self._membership[:, present]
        total, by_part = self._by_part(norms, self._members)
        torch._foreach_mul_(gradients, self._clip_factor(total))
        return total, by_part

    def _clip_factor(self, norm: Tensor) -> Tensor:
        return ((self.clip or math.inf) / (norm + 1e-6)).clamp(max=1.0)

    def _by_part(self, norms: Tensor, members: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Norm over all of the parameters whose `norms` (P,) are given, and of each part, of which `members` tells."""
        by_part = torch.linalg.vector_norm(torch.where(members, norms, 0.0), dim=1)
        return torch.linalg.vector_norm(norms), dict(zip(self._parts, by_part.unbind(), strict=True))


def _part_of(name: str, containers: Container[str]) -> str:
    """The part of the model that a parameter belongs to: a child, or the child of a child that is a container."""
    path = name.split(".")
    return ".".join(path[: 2 if path[0] in containers else 1])


def total_loss(losses: Mapping[str, Tensor]) -> Tensor:
    """The loss to minimise: entries that start with "loss/"; "stats/" entries are for the log."""
    return torch.stack([value.float() for name, value in losses.items() if name.startswith("loss/")]).sum()
