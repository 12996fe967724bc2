"""Decoder layers, each with a loss of its own, that say the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms.tasks import ROUNDED, SAME_ITERATIONS, SAME_WINDOWS
from bevctl.monitor.history import History, Mask
from bevctl.monitor.view import Trouble, View

FEWEST = 3
"""Layers that are not equal by chance, as the losses of a healthy decoder fall from layer to layer."""
_LAYER = re.compile(r"(^|[/._])(?:d|layer_)-?\d+[/._]")


def alike(view: View) -> Iterator[Trouble]:
    """All layers of a decoder log the very same losses: their outputs no longer depend on the input."""
    history = view.history
    groups = _by_layer(history)
    if not groups:
        return
    same = np.logical_and.reduce([_equal(history, names) for names in groups.values()])
    enough = SAME_WINDOWS if history.interval >= 10 else SAME_ITERATIONS
    run = len(same) if same.all() else int(np.argmin(same[::-1]))
    if run < enough:
        return
    first = history.iters[len(same) - run]
    shown = [f"{len(names)} x {name} {history.values[names[0]][-1]:.6g}" for name, names in groups.items()]
    yield Trouble(
        Severity.FAIL,
        f"All layers of the decoder have the very same losses since {view.where(first)}",
        (Evidence(view.where(history.iters[-1]), ", ".join(shown)), Evidence("log", f"{run} records in a row")),
        "A constant stands in for NaN: the decoder's outputs are NaN and are replaced (nan_to_num), so that the loss "
        "stays finite and nothing but a few biases learns. Half precision makes it of an inverse sigmoid, whose 1 / "
        "1e-5 is infinite there.",
        "Compute positions and reference points (inverse sigmoid) in FP32, remove what replaces NaN, and start again "
        "from a checkpoint from before.",
        first,
    )


def _by_layer(history: History) -> dict[str, list[str]]:
    """Parts of the loss that are the same but for the layer, where there are enough layers."""
    groups: dict[str, list[str]] = {}
    for name in history.losses:
        groups.setdefault(_LAYER.sub(r"\1", name), []).append(name)
    return {name: names for name, names in groups.items() if len(names) >= FEWEST}


def _equal(history: History, names: list[str]) -> Mask:
    """Records in which these are finite, equal, and too large to be equal by rounding."""
    values = np.stack([history.column(name) for name in names])
    same: Mask = (values == values[0]).all(0) & (np.abs(values[0]) >= ROUNDED)
    return same
