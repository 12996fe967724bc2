"""What every model of this package can do, whatever it is made of."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bevctl.batch import Batch, Predictions
from bevctl.errors import BevctlError, did_you_mean

_Self = TypeVar("_Self", bound="Network")


class Network(nn.Module):
    """A model that takes a `Batch` and returns losses, with modules that can be kept from learning.

    Losses have the names `loss/<task>/…` and their sum is the loss of the step; `stats/<task>/…` are for the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._frozen: list[str] = []

    def freeze(self, names: Iterable[str]) -> None:
        """Modules that from now on do not learn and stay in evaluation mode.

        Raises BevctlError for a name that no module has.
        """
        modules = dict(self.named_modules())
        for name in names:
            if name not in modules:
                known = [known for known in modules if known and known.count(".") <= name.count(".")]
                raise BevctlError(f"model.freeze: the model has no module {name!r}.", did_you_mean(name, known))
            modules[name].requires_grad_(False)
            self._frozen.append(name)
        self.train(self.training)

    def train(self: _Self, mode: bool = True) -> _Self:
        """As of any module, except that frozen modules stay in evaluation mode."""
        super().train(mode)
        for name in self._frozen:
            self.get_submodule(name).eval()
        return self


class TaskNetwork(Network):
    """A model with a head for each task: "object" finds boxes, "map" the classes of a map.

    A head has `forward`, from what it looks at to its outputs, and `loss` and `predict` of these.
    """

    heads: nn.ModuleDict

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars: weighted losses, whose sum is the loss of the step, under `loss/<task>/…`, and `stats/<task>/…`.

        Raises BevctlError where the batch lacks what the model looks at.
        """
        values: dict[str, Tensor] = {}
        for task, outputs in self._outputs(batch):
            values |= self._head(task).loss(outputs, batch)
        return values

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predictions:
        """What the model sees in a batch, which may be empty."""
        if batch.size == 0:
            nothing: list[Tensor] | None = [] if "object" in self.heads else None
            return Predictions(nothing, nothing, nothing)
        found = {task: self._head(task).predict(outputs) for task, outputs in self._outputs(batch)}
        boxes, scores, labels = found.get("object", (None, None, None))
        return Predictions(boxes, scores, labels, found.get("map"))

    @abstractmethod
    def head_inputs(self, batch: Batch) -> Mapping[str, Any]:
        """What the head of each task looks at."""

    def _outputs(self, batch: Batch) -> Iterable[tuple[str, Any]]:
        """Outputs of each head, one after the other."""
        inputs = self.head_inputs(batch)
        return ((task, self._head(task)(inputs[task])) for task in self.heads)

    def _head(self, task: str) -> Any:
        return self.heads[task]
