from __future__ import annotations

import torch
from torch import Tensor

from bevctl.numerics.expected import Expected, Rule, expected, first_match
from bevctl.numerics.inputs import BatchLayout, InputFault, input_faults, named_tensors
from tests.models.nano import nano_batch, nano_config


def _faults(change: object = None) -> list[InputFault]:
    batch = nano_batch(nano_config())
    if callable(change):
        change(batch)
    return input_faults(batch)


def test_names_lead_through_every_container() -> None:
    value = {"a": [torch.ones(1), (torch.ones(2),)], "b": {"c": torch.ones(3)}, "d": "text"}
    assert [name for name, _ in named_tensors(value)] == ["batch.a[0]", "batch.a[1][0]", "batch.b.c"]
    names = [name for name, _ in named_tensors(nano_batch(nano_config()))]
    assert {"batch.images", "batch.points[1]", "batch.calibration.lidar_aug", "batch.boxes[0]"} <= set(names)


def test_a_plain_batch_has_no_fault_although_a_velocity_is_unknown() -> None:
    batch = nano_batch(nano_config())
    assert batch.boxes[0][0, 7:].isnan().all()
    assert input_faults(batch) == []


def test_a_nan_box_is_a_fault_of_its_sample() -> None:
    def change(batch: object) -> None:
        batch.boxes[1][2, 4] = torch.nan  # type: ignore[attr-defined]

    (fault,) = _faults(change)
    assert (fault.name, fault.kind, fault.samples) == ("batch.boxes[1]", "nonfinite", (1,))
    assert fault.what == "1 NaN in batch.boxes[1] (first at [2, 4])"


def test_nan_and_infinity_are_counted_apart() -> None:
    def change(batch: object) -> None:
        batch.points[0][3, :2] = torch.nan  # type: ignore[attr-defined]
        batch.points[0][5, 2] = -torch.inf  # type: ignore[attr-defined]

    (fault,) = _faults(change)
    assert fault.what.startswith("2 NaN and 1 infinite values in batch.points[0]")


def test_implausible_values_name_the_reason() -> None:
    def change(batch: object) -> None:
        batch.boxes[0][1, 3] = 4e5  # type: ignore[attr-defined]

    (fault,) = _faults(change)
    assert (fault.kind, fault.samples) == ("implausible", (0,))
    assert "no object is longer" in fault.what


def test_a_matrix_that_cannot_be_inverted_is_degenerate() -> None:
    def change(batch: object) -> None:
        batch.calibration.camera2lidar[1, 0, :3, 0] = 0  # type: ignore[attr-defined]

    (fault,) = _faults(change)
    assert (fault.name, fault.kind, fault.samples) == ("batch.calibration.camera2lidar", "degenerate", (1,))


def test_rules_can_be_others() -> None:
    bad = torch.tensor([[1.0, torch.nan]])
    rules = Expected(inputs=(Rule("scores", "column 1 may be empty", columns=(1,)),))
    assert input_faults(bad, "scores", rules) == []
    assert [fault.kind for fault in input_faults(bad, "scores", Expected())] == ["nonfinite"]


def test_every_rule_of_the_package_has_a_reason_and_matches_something_real() -> None:
    rules = expected()
    for section in (rules.inputs, rules.uninitialised, rules.unread, rules.outputs, rules.masking, rules.plausible):
        assert section
        assert all(len(rule.reason) > 10 for rule in section)
    operations = {str(getattr(packet, overload)) for packet, overload in _overloads()}
    for rule in (*rules.uninitialised, *rules.unread, *rules.outputs, *rules.masking):
        assert any(rule.matches(name) for name in operations), rule.pattern
    inputs = [name for name, _ in named_tensors(nano_batch(nano_config()))]
    for rule in (*rules.inputs, *rules.plausible):
        assert any(rule.matches(name) for name in inputs), rule.pattern
    assert first_match(rules.masking, "aten.add.Tensor") is None


def _overloads() -> list[tuple[object, str]]:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:6] == "aten::"
    }
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return [(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]


def _bad_at(shape: tuple[int, ...], *index: int) -> Tensor:
    tensor = torch.zeros(shape)
    tensor[index] = torch.nan
    return tensor


def test_rows_of_a_result_belong_to_samples_or_to_their_images() -> None:
    layout = BatchLayout.of(nano_batch(nano_config(), batch=3))
    assert layout == BatchLayout(3, 2)
    assert layout.samples(_bad_at((3, 5), 1, 0)) == (1,)
    assert layout.samples(_bad_at((6, 2, 4), 5, 1, 1)) == (2,)
    assert layout.samples(_bad_at((4, 5), 1, 0)) is None
    assert layout.samples(_bad_at((3,), 1)) is None
    assert BatchLayout.of([torch.ones(2)]) is None
    assert BatchLayout.of(torch.ones(2)) is None
