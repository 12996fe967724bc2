"""Whose tensors were alive at the peak: by hand-made events of the allocator and marks of parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bevctl.measure import memory_timeline
from bevctl.measure.memory_places import GRADIENTS, INPUTS, watch
from bevctl.measure.memory_timeline import HELD, Timeline
from bevctl.models.build import build_model
from tests.models.nano import nano_batch, nano_config

KIB = 1024


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time of the next mark, µs."""
    now = [0]
    monkeypatch.setattr(memory_timeline, "_now_us", lambda: now[0])
    return now


def event(action: str, time: int, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "time_us": time, "addr": address, "size": size}


def test_the_peak_is_what_was_alive_then_by_part(clock: list[int]) -> None:
    timeline = Timeline()
    for clock[0], part in ((10, "backbone"), (20, "head")):
        timeline.enter(part)
    events = [
        event("alloc", 5, 1, KIB),
        event("alloc", 12, 2, 3 * KIB),
        event("segment_alloc", 13, 9, 2048 * KIB),
        event("alloc", 14, 3, KIB),
        event("free_requested", 15, 3, KIB),
        event("free_completed", 15, 3, KIB),
        event("alloc", 25, 4, 2 * KIB),
        event("free_requested", 26, 2, 3 * KIB),
        event("alloc", 27, 5, KIB),
    ]
    peak = timeline.peak(events, before=10 * KIB)
    assert +peak == {HELD: 10 * KIB, INPUTS: KIB, "backbone": 3 * KIB, "head": 2 * KIB}


def test_what_was_there_before_the_record_is_freed_from_it(clock: list[int]) -> None:
    timeline = Timeline()
    events = [event("free_requested", 1, 7, 2 * KIB), event("alloc", 2, 8, KIB), event("alloc", 3, 9, 4 * KIB)]
    assert +timeline.peak(events, before=3 * KIB) == {HELD: KIB, INPUTS: 5 * KIB}
    assert clock == [0]


def test_a_gradient_is_told_from_other_tensors_of_its_part(clock: list[int]) -> None:
    gradient = torch.zeros(256)
    timeline = Timeline()
    clock[0] = 10
    timeline.enter("head")
    clock[0] = 20
    timeline.relabel(gradient, GRADIENTS)
    address = gradient.untyped_storage().data_ptr()
    events = [event("alloc", 12, address, KIB), event("alloc", 13, 1, KIB), event("alloc", 30, 2, KIB)]
    assert +timeline.peak(events, before=0) == {GRADIENTS: KIB, "head": 2 * KIB}


def test_sizes_are_those_of_blocks() -> None:
    assert Timeline().peak([event("alloc", 1, 1, 1)], before=0)[INPUTS] == 512


def test_every_part_of_a_step_leaves_its_mark() -> None:
    config = nano_config()
    model, timeline = build_model(config).train(), Timeline()
    watch(model, timeline, ())
    losses = model(nano_batch(config))
    torch.stack([value for name, value in losses.items() if name.startswith("loss/")]).sum().backward()
    assert {"encoders.camera.backbone", "encoders.lidar", "fuser", "decoder", "heads.object"} <= set(timeline._parts)
    assert len(timeline._labels) == sum(p.grad is not None for p in model.parameters())
