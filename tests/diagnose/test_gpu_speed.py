"""Causes of no speed-up on a GPU, each provoked and named first; the healthy step says how much of the gain it has.

`pytest -s` shows what each step was found to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from bevctl.diagnose import speed_causes
from bevctl.diagnose.speed_causes import Cause, causes
from bevctl.diagnose.speed_ceiling import HEALTHY, ceiling, verdict
from bevctl.measure.bench import gains_of_half
from bevctl.measure.step_profile import StepProfile, Workload, profile_step
from tests.diagnose.slow_models import (
    Assignment,
    Chain,
    FunctionalOff,
    Launches,
    LiftInSingle,
    Net,
    Serial,
    SparseInSingle,
    odd,
    with_printing_hooks,
    workload,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA, HALF = torch.device("cuda"), torch.float16
BATCH, SIZE, WIDTH, DEPTH = 8, 128, 256, 6
STEPS = 5


def made(middle: nn.Module, dtype: torch.dtype = HALF) -> Workload:
    return workload(Net(middle, WIDTH, DEPTH), BATCH, SIZE, CUDA, dtype)


def profiled(work: Workload) -> StepProfile:
    profile = profile_step(work, STEPS)
    kernels = profile.kernels
    assert kernels is not None
    told = f"{1e3 * profile.seconds:.1f} ms, busy {1e3 * kernels.busy:.1f}, products {1e3 * kernels.products:.1f}"
    print(
        f"\n{told} (half {1e3 * kernels.half_products:.1f}), {kernels.launches:.0f} launches, waits {profile.waits[:3]}"
    )
    return profile


def named(work: Workload) -> list[Cause]:
    found = causes(profiled(work), None)
    for cause in found:
        print(f"  {cause.id} {cause.lost:.2f} {cause.title}; {[(e.where[-40:], e.what) for e in cause.evidence][:3]}")
    assert found, "no cause was found"
    return found


def test_a_healthy_step_has_no_fault_and_says_how_much_it_gains() -> None:
    half, single = profiled(made(nn.Identity())), profiled(made(nn.Identity(), torch.float32))
    found = causes(half, single)
    limit = ceiling(half, single, *gains_of_half("fp16", CUDA))
    told = verdict(found, limit)
    assert told is not None
    print(told.title, limit.sentence())
    assert [cause.title for cause in found if cause.lost >= speed_causes.WORTH] == []
    assert told.title.startswith("no fault: at ")
    assert limit.share > HEALTHY
    assert half.kernels is not None
    print([(name[:120], f"{1e3 * seconds:.2f} ms") for name, seconds, _ in half.kernels.longest])
    assert half.kernels.half_products > 0.5 * half.kernels.products


@pytest.mark.parametrize(
    ("middle", "id_"),
    [
        (lambda: SparseInSingle(WIDTH), speed_causes.ISLAND),
        (lambda: FunctionalOff(WIDTH), speed_causes.ISLAND),
        (lambda: LiftInSingle(16), speed_causes.ISLAND),
        (lambda: Assignment(100), speed_causes.HOST_WAITS),
        (lambda: Serial(4_000_000, 20), speed_causes.UNTOUCHED),
        (lambda: Launches(6000), speed_causes.LAUNCHES),
    ],
    ids=["sparse", "autocast off", "lift-splat", "assignment", "serial", "launches"],
)
def test_each_cause_is_named_first(middle: Callable[[], nn.Module], id_: str) -> None:
    cause = named(made(middle()))[0]
    assert cause.id == id_
    assert cause.lost >= speed_causes.WORTH
    if id_ != speed_causes.LAUNCHES:
        assert cause.part == "middle"


def test_a_batch_that_is_too_small() -> None:
    cause = named(workload(Net(Chain(64, 200), 64), 1, 16, CUDA, HALF))[0]
    assert (cause.id, cause.title.split(":")[0]) == (speed_causes.LAUNCHES, "A batch of 1 is too small")


def test_hooks_that_read_numbers() -> None:
    net = with_printing_hooks(Net(nn.Sequential(*(nn.Identity() for _ in range(40))), WIDTH, DEPTH))
    cause = named(workload(net, BATCH, SIZE, CUDA, HALF))[0]
    assert cause.id == speed_causes.HOST_WAITS
    assert any("slow_models.py" in evidence.where for evidence in cause.evidence)


def test_odd_widths() -> None:
    assert named(workload(odd(250, DEPTH), BATCH, SIZE, CUDA, HALF))[0].id == speed_causes.ODD_WIDTHS


def test_half_precision_that_is_not_on() -> None:
    assert named(replace(made(nn.Identity(), torch.float32), precision="fp16"))[0].id == speed_causes.INACTIVE


def test_a_slow_loader() -> None:
    assert named(replace(made(nn.Identity()), load=lambda: time.sleep(0.1)))[0].id == speed_causes.DATA_WAIT
