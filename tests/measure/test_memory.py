"""The predicted memory of a step: the allocator's rules, the trace, and what is made of both."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.config.schema import Config
from bevctl.measure.memory import CUBLAS_WORKSPACE, WORKSPACE_SHARE, Predictor, _extrapolated, need_of
from bevctl.measure.memory_allocator import Allocator
from bevctl.measure.memory_inputs import active_sites
from bevctl.measure.memory_places import GRADIENTS
from bevctl.measure.memory_trace import SampleSize, StepMemory, trace_step
from bevctl.measure.parameters import count_parameters
from bevctl.ops import backend
from tests.models.nano import nano_config

MIB = 2**20
SIZE = SampleSize(points=2000, sites=(900, 1000, 500, 200, 150), boxes=3)


def without_camera(**changes: object) -> Config:
    return nano_config(**{"model.camera": None, **changes})


def test_small_and_large_tensors_have_a_segment_each_that_grows_by_pages() -> None:
    allocator = Allocator()
    allocator.take(1)
    assert (allocator.allocated, allocator.reserved) == (512, 2 * MIB)
    allocator.take(MIB)
    assert allocator.reserved == 2 * MIB
    allocator.take(3 * MIB)
    assert allocator.reserved == 22 * MIB
    allocator.take(18 * MIB - 1)  # 17 are left at the end
    assert allocator.reserved == 42 * MIB


def test_a_hole_is_filled_before_the_end_is_used() -> None:
    allocator = Allocator()
    first, _, _ = (allocator.take(size * MIB) for size in (12, 2, 3))
    allocator.give(first)
    allocator.take(3 * MIB)
    assert allocator.reserved == 20 * MIB
    allocator.take(9 * MIB)
    assert (allocator.allocated, allocator.reserved) == (17 * MIB, 20 * MIB), "both went into the hole"


def test_a_freed_block_is_used_again_and_joined_with_its_neighbours() -> None:
    allocator = Allocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for block in blocks[1:3]:
        allocator.give(block)
    allocator.take(8 * MIB)
    assert (allocator.allocated, allocator.reserved) == (18 * MIB, 20 * MIB)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30 * MIB), st.booleans()), max_size=40))
def test_what_is_freed_is_all_free_again(steps: list[tuple[int, bool]]) -> None:
    allocator, held = Allocator(), []
    for size, give in steps:
        held.append(allocator.take(size))
        assert allocator.allocated <= allocator.reserved
        if give:
            allocator.give(held.pop(0))
    assert allocator.allocated == sum(block.size for block in held)
    for block in held:
        allocator.give(block)
    reserved = allocator.reserved
    assert allocator.allocated == 0
    for size, _ in steps[:1]:
        allocator.take(size)
    assert allocator.reserved == reserved


@pytest.mark.parametrize("checkpointing", [(), ("lidar", "decoder")])
def test_a_step_is_traced_by_part(checkpointing: tuple[str, ...]) -> None:
    config = without_camera(**{"model.checkpointing": checkpointing})
    step = trace_step(config, "fp16", [SIZE])
    assert step.parameters >= 4 * count_parameters(config).trainable
    assert step.learning == step.parameters
    assert {"encoders.lidar", "decoder", "heads.object"} <= set(step.by_part)
    assert step.peak <= step.reserved


def test_larger_clouds_and_wider_numbers_take_more() -> None:
    config = without_camera(**{"train.cuda_graphs": False})
    doubled = dataclasses.replace(SIZE, sites=tuple(40 * count for count in SIZE.sites))
    half, full, large = (
        trace_step(config, precision, [size]) for precision, size in (("fp16", SIZE), ("fp32", SIZE), ("fp16", doubled))
    )
    assert half.pools == 0
    assert half.peak < full.peak
    assert half.by_part["encoders.lidar"] < large.by_part["encoders.lidar"]
    assert half.parameters == full.parameters


def test_many_samples_follow_from_one_and_two() -> None:
    config = without_camera(**{"train.cuda_graphs": False})
    size = dataclasses.replace(SIZE, sites=(3900,) * 5)  # fills whole steps of `Room`
    extrapolated = Predictor(config, size).need("fp16", 4, ())
    traced = need_of(config, trace_step(config, "fp16", [size] * 4), "fp16")
    assert extrapolated.allocated == pytest.approx(traced.allocated, rel=0.05)


def test_parts_of_many_samples_add_up_to_the_peak_where_it_moves() -> None:
    """With one sample gradients are alive at the peak, with two it comes before them."""
    step = StepMemory(100, 80, 10, by_part={"decoder": 900, GRADIENTS: 100}, pools=0, reserved=1010)
    two = dataclasses.replace(step, by_part={"decoder": 1900}, reserved=1905)
    many = _extrapolated(step, two, 8)
    assert many.by_part.keys() == {"decoder", GRADIENTS}
    assert many.peak == 1000 + 7 * 900
    assert many.reserved >= many.peak


def test_a_need_is_the_sum_of_its_components() -> None:
    step = StepMemory(parameters=100, learning=80, buffers=10, by_part={"decoder": 1000}, pools=0, reserved=1500)
    need = need_of(without_camera(), step, "fp16")
    assert need.components["optimizer"] == 160
    assert need.components["workspace"] == round(WORKSPACE_SHARE * 1000) + 2 * CUBLAS_WORKSPACE
    assert need.allocated == 100 + 160 + 10 + 1000 + need.components["workspace"]
    recorded = need_of(without_camera(), dataclasses.replace(step, pools=500), "fp16")
    assert recorded.allocated == need.allocated + 4 * CUBLAS_WORKSPACE
    assert need.reserved == need.allocated + 500
    assert need.device == need.reserved + need.components["CUDA context"]


def test_the_sites_of_a_cloud_are_those_of_its_encoder() -> None:
    config = without_camera()
    low, high = (torch.tensor(config.model.point_cloud_range[i : i + 3]) for i in (0, 3))
    points = torch.cat([low + (high - low) * torch.rand(200, 3), torch.zeros(200, 2)], dim=1)
    voxels, *later = active_sites(config, points)
    assert 0 < voxels <= 200
    assert len(later) == 4
    assert all(count > 0 for count in later)


def test_several_gpus_hold_their_gradients_in_buckets() -> None:
    step = StepMemory(
        parameters=100, learning=80, buffers=10, by_part={"decoder": 1000, GRADIENTS: 30}, pools=0, reserved=1500
    )
    alone, shared = need_of(without_camera(), step, "fp16"), need_of(without_camera(), step, "fp16", gpus=2)
    assert shared.allocated == alone.allocated + 80 - 30
    assert shared.device - shared.reserved == alone.device - alone.reserved + shared.components["NCCL"]
    inside = sum(size for name, size in shared.components.items() if name not in ("NCCL", "CUDA context"))
    assert inside == shared.allocated


def test_plain_torch_keeps_what_the_kernels_do_not() -> None:
    config = nano_config(**{"train.cuda_graphs": False})
    with_kernels = trace_step(config, "fp16", [SIZE])
    with backend.forced("torch"):
        plain = trace_step(config, "fp16", [SIZE])
    assert plain.by_part["encoders.camera.backbone"] > with_kernels.by_part["encoders.camera.backbone"]
    assert plain.parameters == with_kernels.parameters
