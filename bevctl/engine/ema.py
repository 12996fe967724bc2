"""Exponential moving average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """Average of every floating-point entry of the model's state dict; the rest is taken as it is."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._live = {k: v for k, v in model.state_dict().items() if v.is_floating_point()}
        self._average = {k: v.detach().clone() for k, v in self._live.items()}

    @torch.no_grad()
    def update(self, iteration: int) -> None:
        """Moves the average towards the weights after `iteration` steps; early on the decay is shorter."""
        decay = min(self.decay, (1 + iteration) / (10 + iteration))
        torch._foreach_lerp_(list(self._average.values()), list(self._live.values()), 1.0 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model computes with the averaged weights inside the block."""
        trained = {k: v.detach().clone() for k, v in self._live.items()}
        self._write(self._average)
        try:
            yield
        finally:
            self._write(trained)

    def state_dict(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in self._average.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes the entries of `state` that the model has in the same shape."""
        for key, average in self._average.items():
            if key in state and state[key].shape == average.shape:
                average.copy_(state[key])

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for key, live in self._live.items():
            live.copy_(values[key])
