"""`.log.json` of mmcv 1.x: a line about the run, then a line an interval; no clock times."""

from __future__ import annotations

from typing import Any

from bevctl.runs.collect import Collector
from bevctl.runs.layout import Row, is_count, numbers
from bevctl.runs.readers.clock import Clock
from bevctl.runs.readers.epochs import Epochs
from bevctl.runs.readers.header import limits_of, parse_env, set_config
from bevctl.runs.readers.json_lines import JsonLines
from bevctl.runs.readers.names import scores
from bevctl.runs.readers.text import Place

_META = ("env_info", "mmcv_version", "exp_name", "config", "hook_msgs", "fp16")


def recognises(line: str) -> bool:
    """Whether a line can only be this format's."""
    return line.startswith(('{"mode": "train"', '{"mode": "val"', '{"mode":"train"', '{"mode":"val"')) or (
        line.startswith("{") and any(f'"{name}"' in line[:2000] for name in _META)
    )


class MmcvJson(JsonLines):
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        super().__init__(out, clock, place)
        self._epochs = Epochs()

    def _item(self, item: dict[str, Any], number: int) -> bool:
        mode = item.pop("mode", None)
        if mode is None:
            return self._meta(item, number)
        epoch, inner = item.pop("epoch", None), item.pop("iter", None)
        if not is_count(epoch) or not is_count(inner):
            return False
        if mode == "val":
            self._scores(epoch, item)
            return True
        layout, values = self._layouts.of_items(item)
        self._text.step(Row(layout, values, epoch, self._epochs.total(epoch, inner), None))
        return True

    def _scores(self, epoch: int, item: dict[str, Any]) -> None:
        item.pop("lr", None)
        last = self._out.last
        self._out.validation(epoch, last.iter if last else None, scores(numbers(item)))

    def _meta(self, item: dict[str, Any], number: int) -> bool:
        """The line about the run; of a resumed one the checkpoint's."""
        header, where = self._out.log.header, self._text.place.line(number)
        if not any(name in item for name in _META):
            return False
        if isinstance(item.get("env_info"), str):
            header["env"] = parse_env(item["env_info"])
        if isinstance(item.get("config"), str):
            set_config(header, item["config"])
            self._out.log.max_epochs, self._out.log.max_iters = limits_of(item["config"])
        header["meta"] = {
            name: value for name, value in item.items() if name not in ("config", "env_info", "hook_msgs")
        }
        epoch, iteration = item.get("epoch"), item.get("iter")
        if is_count(epoch) and is_count(iteration) and epoch and iteration:
            self._epochs.resumed(iteration)
            self._out.log.iters_per_epoch = iteration // epoch if iteration % epoch == 0 else None
            self._out.begin("resume", f"Resumed after epoch {epoch}, iteration {iteration}", where, **_scaler(item))
        else:
            self._out.begin("start", "A run starts", where)
        return True


def _scaler(meta: dict[str, Any]) -> dict[str, Any]:
    """The loss scale that the checkpoint goes on with."""
    fp16 = meta.get("fp16")
    scaler = fp16.get("loss_scaler") if isinstance(fp16, dict) else None
    scale = scaler.get("scale", scaler.get("cur_scale")) if isinstance(scaler, dict) else None
    return {"loss_scale": float(scale)} if isinstance(scale, (int, float)) else {}
