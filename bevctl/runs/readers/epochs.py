"""Iterations since the start of a run, where a log counts them anew in every epoch."""

from __future__ import annotations


class Epochs:
    """Iterations since the start of the run, from logs that count them anew in every epoch."""

    def __init__(self) -> None:
        self._base = 0
        self._epoch: int | None = None
        self._inner = 0

    def resumed(self, iteration: int) -> None:
        """`iteration` steps were done before what follows."""
        self._base, self._epoch, self._inner = iteration, None, 0

    def total(self, epoch: int, inner: int, length: int | None = None) -> int:
        """Iterations up to the `inner`-th of `epoch`; without the `length` of one the last seen counts as its end."""
        if self._epoch is not None:
            if epoch < self._epoch:  # an earlier epoch again: what was counted since cannot be known
                self._base = self._base * (epoch - 1) // max(self._epoch - 1, 1)
            elif epoch > self._epoch and inner <= self._inner:
                self._base = (epoch - 1) * length if length else self._base + self._inner
        elif inner > self._base:
            self._base = 0  # counted from the start of the run already
        self._epoch, self._inner = epoch, inner
        return self._base + inner
