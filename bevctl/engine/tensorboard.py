"""Event files of a run, for TensorBoard; needs the package tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bevctl.errors import BevctlError
from bevctl.runs.records import StepRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
"""Below the work_dir."""
_FIELDS = (
    "loss",
    "lr",
    "grad_norm",
    "loss_scale",
    "skipped_steps",
    "iter_time_s",
    "data_time_s",
    "memory_gib",
    "samples_per_s",
    "epoch",
)


def summary_writer() -> type[SummaryWriter]:
    """torch's writer of event files.

    Raises:
        BevctlError: the package tensorboard, which it needs, cannot be imported.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise BevctlError(
            f"--tensorboard (train.tensorboard) needs the package tensorboard: {missing}.",
            "pip install 'bevctl[tensorboard]'",
        ) from missing
    return SummaryWriter


class EventFiles:
    """Appends to the event files of one run, under the names that its other logs use.

    Args:
        iteration: attempted steps before this start; what a run that was cut off wrote beyond it is superseded.

    Raises:
        BevctlError: see `summary_writer`.
    """

    def __init__(self, work_dir: Path, iteration: int) -> None:
        self._writer = summary_writer()(work_dir / FOLDER, purge_step=iteration + 1)

    def step(self, record: StepRecord) -> None:
        """Adds one iteration as `train/<metric>`."""
        measured = {name: getattr(record, name) for name in _FIELDS}
        values = {name: value for name, value in measured.items() if value is not None} | record.losses
        self._add("train", values, record.iter, record.time)

    def evaluation(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Adds scores as `val/<metric>`."""
        self._add("val", metrics, iteration)
        self._writer.flush()

    def _add(self, prefix: str, values: Mapping[str, float], iteration: int, time: float | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{prefix}/{name}", value, iteration, walltime=time)

    def close(self) -> None:
        self._writer.close()
