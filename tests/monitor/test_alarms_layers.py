"""Losses of decoder layers as PETR (d0.loss_cls) and bevctl (layer_0_loss_cls) log them."""

from __future__ import annotations

import pytest

from tests.monitor.runs import found, judge, make_log

LAYERS = {
    "petr": ["loss_cls", "loss_bbox", *(f"d{i}.loss_{part}" for i in range(5) for part in ("cls", "bbox"))],
    "bevctl": [f"loss/object/layer_{i}_loss_{part}" for i in (-1, 0, 1, 2) for part in ("cls", "bbox")],
    "map": [f"loss/map/layer_{i}/focal" for i in range(3)],
}


def falling(records: int, offset: float = 0.0) -> list[float]:
    return [round(2.0 - row / records + 0.01 * (row % 5) + offset, 4) for row in range(records)]


def columns(names: list[str], records: int, alike_from: int) -> dict[str, list[float]]:
    """A healthy decoder, whose layers differ, until from one record on they do not."""
    values = {}
    for place, name in enumerate(names):
        healthy, same = falling(records, 0.02 * place), falling(records, 0.5 if "bbox" in name else 0.0)
        values[name] = healthy[:alike_from] + same[alike_from:]
    return values


@pytest.mark.parametrize("names", LAYERS.values(), ids=list(LAYERS))
def test_layers_that_are_alike_hide_a_nan(names: list[str]) -> None:
    report = judge(make_log(40, columns(names, 40, alike_from=25)))
    assert found(report)["NAN006"] == "fail"
    alarm = next(alarm for alarm in report.alarms if alarm.id == "NAN006")
    assert alarm.first_record is not None
    assert alarm.first_record["iter"] == 1300
    assert "inverse sigmoid" in alarm.cause
    assert f"{len(names) // (1 if names is LAYERS['map'] else 2)} x " in alarm.evidence[0].what


@pytest.mark.parametrize("names", LAYERS.values(), ids=list(LAYERS))
@pytest.mark.parametrize("alike_from", [35, 40])
def test_healthy_layers_and_a_few_equal_records_are_no_alarm(names: list[str], alike_from: int) -> None:
    assert "NAN006" not in found(judge(make_log(40, columns(names, 40, alike_from))))


def test_two_layers_or_one_piece_that_differs_are_no_alarm() -> None:
    values = columns(LAYERS["petr"], 40, alike_from=0)
    values["d3.loss_bbox"] = [value + 0.001 for value in values["d3.loss_bbox"]]
    assert "NAN006" not in found(judge(make_log(40, values)))
    assert "NAN006" not in found(judge(make_log(40, columns(["loss_cls", "d0.loss_cls"], 40, alike_from=0))))


def test_losses_that_are_small_are_equal_by_rounding() -> None:
    names = LAYERS["map"]
    assert "NAN006" not in found(judge(make_log(40, dict.fromkeys(names, 0.0004))))
