"""`vis_data/scalars.json` of mmengine: one object an interval; no clock times."""

from __future__ import annotations

from typing import Any

from bevctl.runs.layout import Row, is_count, numbers
from bevctl.runs.readers.json_lines import JsonLines
from bevctl.runs.readers.names import scores


def recognises(line: str) -> bool:
    """Whether a line can only be this format's."""
    return line.startswith("{") and '"step": ' in line and '"mode"' not in line and '"iter_time_s"' not in line


class MmengineJson(JsonLines):
    """A `Parser` (see `bevctl.runs.readers`)."""

    def _item(self, item: dict[str, Any], number: int) -> bool:  # noqa: ARG002 - nothing here has a place
        step, epoch = item.pop("step", None), item.pop("epoch", None)
        item.pop("iter", None)  # the same as step, where it is
        if not is_count(step):
            return False
        if epoch is None and "lr" not in item and "loss" not in item:
            self._scores(step, item)
            return True
        layout, values = self._layouts.of_items(item)
        self._text.step(Row(layout, values, epoch if is_count(epoch) else 1, step, None))
        return True

    def _scores(self, step: int, item: dict[str, Any]) -> None:
        """Scores, whose step is the epoch where training goes by epochs."""
        last = self._out.last
        item.pop("time", None)
        item.pop("data_time", None)
        epoch = step if last is None or step <= last.epoch else last.epoch
        self._out.validation(epoch, last.iter if last else None, scores(numbers(item)))
