"""Logs made up for tests: the formats are other projects', every number is ours."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from pathlib import Path

START = datetime.datetime(2026, 2, 3, 4, 5, 6, 789000)
"""Local time of the first train line."""


def moment(seconds: float) -> datetime.datetime:
    """Local time so long after START."""
    return START + datetime.timedelta(seconds=seconds)


def mmcv_message(seconds: float, body: str, level: str = "INFO", logger: str = "mmdet3d") -> str:
    time = moment(seconds)
    return f"{time:%Y-%m-%d %H:%M:%S},{time.microsecond // 1000:03d} - {logger} - {level} - {body}"


def mmcv_items(changes: dict[str, str]) -> str:
    items = {
        "lr": "2.000e-05",
        "eta": "1:02:03",
        "time": "0.611",
        "data_time": "0.020",
        "memory": "9216",
        "loss/object/loss_heatmap": "1.2000",
        "loss/object/layer_-1_loss_bbox": "0.9000",
        "stats/object/matched_ious": "0.4100",
        "loss": "2.1000",
        "grad_norm": "4.1000",
    }
    return ", ".join(f"{name}: {value}" for name, value in {**items, **changes}.items() if value)


def mmcv_line(epoch: int, inner: int, seconds: float | None = None, per_epoch: int = 400, **changes: str) -> str:
    """A train line of window `inner` (its last iteration) of `epoch`; `changes` with an empty text drop an item."""
    at = (epoch - 1) * per_epoch + inner if seconds is None else seconds
    return mmcv_message(at, f"Epoch [{epoch}][{inner}/{per_epoch}]\t{mmcv_items(changes)}")


def mmcv_lines(windows: int, per_epoch: int = 400, interval: int = 50) -> list[str]:
    """That many windows, one after the other, whose loss is the number of the window."""
    places = [divmod(window * interval, per_epoch) for window in range(windows)]
    return [
        mmcv_line(epoch + 1, inner + interval, per_epoch=per_epoch, loss=f"{number + 1}.0000")
        for number, (epoch, inner) in enumerate(places)
    ]


def write(path: Path, lines: Iterable[str], end: str = "\n") -> Path:
    """The lines as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + end for line in lines), encoding="utf-8", newline="")
    return path
