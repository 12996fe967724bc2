"""What every model of this package can do, whatever it is made of."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from bevctl.errors import BevctlError, did_you_mean


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

    def train(self, mode: bool = True) -> Network:
        """As of any module, except that frozen modules stay in evaluation mode."""
        super().train(mode)
        for name in self._frozen:
            self.get_submodule(name).eval()
        return self
