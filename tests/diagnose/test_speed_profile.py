"""Causes of no speed-up, each in a small model that has it, seen by a profile; the healthy one shows none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from bevctl.config.schema import Config
from bevctl.diagnose import speed_causes
from bevctl.diagnose.speed_causes import Cause, causes
from bevctl.diagnose.speed_ceiling import Ceiling, ceiling, tables, verdict
from bevctl.diagnose.speed_trials import try_workers
from bevctl.measure.kernel_record import BACKWARD, COPY, KERNEL, PART, WAIT, KernelRecord, Span, summarise
from bevctl.measure.step_profile import StepProfile, Workload, profile_step
from bevctl.numerics.census import ODD, OFF, OUT_OF_REACH, SMALL, Census
from tests.diagnose import slow_models
from tests.diagnose.slow_models import (
    Assignment,
    FunctionalOff,
    LiftInSingle,
    Net,
    Serial,
    SparseInSingle,
    odd,
    with_printing_hooks,
    workload,
)
from tests.models.nano import nano_config

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, HALF = torch.device("cpu"), torch.bfloat16
SIZE, WIDTH = 48, 32


def made(middle: nn.Module, width: int = WIDTH, dtype: torch.dtype = HALF) -> Workload:
    return workload(Net(middle, width), 2, SIZE, CPU, dtype)


def first(work: Workload) -> Cause:
    found = causes(profile_step(work, 2), None)
    assert found, "no cause was found"
    return found[0]


def test_a_healthy_step_has_no_cause() -> None:
    found = causes(profile_step(made(nn.Identity()), 2), None)
    assert [cause for cause in found if cause.lost >= speed_causes.WORTH] == []


@pytest.mark.parametrize(
    ("middle", "id_", "line"),
    [
        (lambda: SparseInSingle(WIDTH), speed_causes.ISLAND, "torch.mm(rows"),
        (lambda: FunctionalOff(WIDTH), speed_causes.ISLAND, "F.conv2d"),
        (lambda: LiftInSingle(40), speed_causes.ISLAND, "outer = "),
        (lambda: Assignment(60), speed_causes.HOST_WAITS, ".item()"),
        (lambda: Serial(60_000, 8), speed_causes.UNTOUCHED, "torch.sort"),
    ],
)
def test_each_cause_is_named_first_with_its_line(middle: object, id_: str, line: str) -> None:
    cause = first(made(middle()))  # type: ignore[operator]
    assert (cause.id, cause.part) == (id_, "middle")
    source = Path(slow_models.__file__).read_text(encoding="utf-8").splitlines()
    places = [e.where.rsplit(":", 1) for e in cause.evidence if e.where.startswith(slow_models.__file__)]
    assert any(line in source[int(number) - 1] for _, number in places)
    assert cause.finding().severity.value == "warn"


def test_hooks_that_read_numbers_are_host_waits() -> None:
    net = with_printing_hooks(Net(nn.Sequential(*(nn.Identity() for _ in range(30))), WIDTH))
    assert first(workload(net, 2, SIZE, CPU, HALF)).id == speed_causes.HOST_WAITS


def test_half_precision_that_is_not_on() -> None:
    work = made(nn.Identity(), dtype=torch.float32)
    cause = first(Workload(**{**vars(work), "precision": "fp16"}))
    assert (cause.id, cause.title) == (speed_causes.INACTIVE, "Half precision is not on")


def test_odd_widths() -> None:
    cause = first(workload(odd(90, 3), 1, SIZE, CPU, HALF))
    assert cause.id == speed_causes.ODD_WIDTHS
    assert "backbone" in cause.evidence[0].what


def test_a_slow_loader() -> None:
    work = workload(Net(nn.Identity(), WIDTH), 1, SIZE, CPU, HALF, load=lambda: time.sleep(0.05))
    cause = first(work)
    assert cause.id == speed_causes.DATA_WAIT
    assert cause.lost > 0.5


@pytest.mark.parametrize(("processes", "helps"), [(4, True), (1, False)])
def test_more_loading_processes_are_tried(processes: int, helps: bool) -> None:
    """Batches take 40 ms to make, by as many processes as there are cores."""

    def load(config: Config) -> Iterator[None]:
        while True:
            time.sleep(max(0.0, 0.040 / min(config.train.workers, processes) - 0.02))
            yield

    tried = try_workers(nano_config(**{"train.batch": 2, "train.workers": 1}), load, step_s=0.02, iteration_s=0.04)
    assert (tried.attempt.set, tried.seconds is not None) == ({"train.workers": 4}, True)
    assert tried.remedy().verified is helps


def test_the_census_tells_why_products_are_not_in_half_precision() -> None:
    net = Net(nn.Sequential(FunctionalOff(16), SparseInSingle(16)), 16)
    with Census(net, "cpu") as census, torch.autocast("cpu", dtype=HALF):
        net(torch.randn(1, 8, 16, 16))
    why = {reason: sum(group.why[reason] for group in census.groups.values()) for reason in (OFF, OUT_OF_REACH, ODD)}
    pixels = 16 * 16
    assert why == {OFF: 2 * pixels * 9 * 16 * 16, OUT_OF_REACH: 9 * 2 * pixels * 16 * 16, ODD: 0}
    assert census.total("half_flops") + sum(why.values()) == census.total("flops")
    assert census.total("planar_flops") > 0
    assert census.total("raised_bytes") > 0
    with Census(net, "cpu") as census, torch.autocast("cpu", dtype=HALF):
        nn.functional.linear(torch.randn(2, 8), torch.randn(8, 8))
    assert sum(group.why[SMALL] for group in census.groups.values()) == 2 * 2 * 8 * 8


def _in_half() -> Census:
    """A product in half precision."""
    with Census(nn.Identity(), "cpu") as census:
        torch.mm(torch.ones(256, 256, dtype=HALF), torch.ones(256, 256, dtype=HALF))
    return census


def _profile(kernels: KernelRecord | None = None, seconds: float = 0.1, **changes: object) -> StepProfile:
    values: dict[str, object] = {
        "precision": "fp16",
        "batch": 4,
        "seconds": seconds,
        "split": {"forward/rest": 0.4 * seconds, "backward/rest": 0.5 * seconds, "optimizer": 0.1 * seconds},
        "products": 0.6 * seconds,
        "idle": 0.1 * seconds,
        "census": _in_half(),
        "kernels": kernels,
    }
    return StepProfile(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("batch", "title"), [(1, "A batch of 1 is too small"), (8, "The host is the limit")])
def test_launches_that_the_host_cannot_keep_up_with(batch: int, title: str) -> None:
    kernels = KernelRecord(step=0.1, busy=0.04, launches=20_000)
    found = causes(_profile(kernels, idle=0.06, batch=batch), None)
    assert [cause.id for cause in found] == [speed_causes.LAUNCHES]
    assert found[0].title.startswith(f"{title}: 20000 launches of 2 µs")
    assert causes(_profile(KernelRecord(step=0.1, busy=0.09, launches=20_000), idle=0.01), None) == []


def test_the_exchange_between_gpus() -> None:
    kernels = KernelRecord(step=0.1, busy=0.1, launches=100, communication=0.03)
    assert causes(_profile(kernels, idle=0.0), None)[0].id == speed_causes.COMMUNICATION


def test_the_ceiling_is_what_the_parts_allow() -> None:
    single = _profile(precision="fp32", idle=0.02, products=0.04)
    limit = ceiling(_profile(seconds=0.06), single, rate=4.0)
    # 20 ms idle and 10 ms of optimizer stay, 40 ms of products become 10, the other 30 ms 15
    assert limit.most == pytest.approx(0.1 / (0.02 + 0.01 + 0.01 + 0.015))
    assert limit.reached == pytest.approx(0.1 / 0.06)
    assert "20% of the FP32 iteration is time without any operation" in limit.sentence()
    assert limit.sentence().startswith("Half precision can give at most 1.82 × here, because")


def test_the_ceiling_tells_tf32_from_fp32() -> None:
    kernels = KernelRecord(step=0.1, busy=0.08, products=0.04, tf32_products=0.03)
    single = _profile(kernels, precision="fp32", idle=0.02, products=0.04)
    limit = ceiling(_profile(seconds=0.08), single, rate=10.0, tf32_rate=2.0)
    # 30 ms stay, 10 ms in FP32 become 1, 30 ms in TF32 become 15, as does the rest
    assert limit.most == pytest.approx(0.1 / (0.03 + 0.001 + 0.015 + 0.015))
    told = "30% of the FP32 iteration is matrix arithmetic in TF32, 2.0 × as fast in half precision, 10% of"
    assert told in limit.sentence()


def test_the_ceiling_is_at_least_what_was_reached() -> None:
    limit = ceiling(_profile(seconds=0.02), _profile(precision="fp32", idle=0.02, products=0.04), rate=4.0)
    assert limit.most == limit.reached == pytest.approx(5.0)


def test_a_healthy_run_says_how_much_of_the_ceiling_it_has() -> None:
    told = verdict([], Ceiling(2.0, 1.8, "…"))
    assert told.title == "no fault: at 90% of what half precision can give (1.80 ×)"
    faulty = verdict([Cause("SPEED112", 0.4, "x", (), "")], Ceiling(2.0, 1.0, "…"))
    assert faulty.title == "Half precision gives 1.00 ×, at 50% of what half precision can give"


def test_what_a_gpu_did_is_read_from_events() -> None:
    spans = [
        Span(PART, "backbone", 0.0, 0.030),
        Span(PART, "head", 0.030, 0.060),
        Span(KERNEL, "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32", 0.010, 0.020),
        Span(KERNEL, "elementwise", 0.016, 0.025),
        Span(KERNEL, "void cudnn::ops::nchwToNhwcKernel<__half>", 0.012, 0.013),
        Span(COPY, "Memcpy HtoD (Pinned -> Device)", 0.025, 0.030),
        Span(WAIT, "cudaStreamSynchronize", 0.031, 0.049),
        Span(KERNEL, "ampere_sgemm_128x64_nn", 0.050, 0.060),
        Span(KERNEL, "sm90_xmma_wgrad_implicit_gemm_tf32f32_tf32f32_f32", 0.060, 0.062),
        Span(KERNEL, "_convolve_gradient_kernel", 0.062, 0.065),
        Span(KERNEL, "ncclDevKernel_AllReduce", 0.080, 0.090),
    ]
    record = summarise(spans, steps=1, seconds=0.1)
    assert record.busy == pytest.approx(0.045)
    assert record.idle == pytest.approx(0.055)
    assert (record.launches, record.layout) == (8, pytest.approx(0.001))
    assert (record.products, record.half_products) == (pytest.approx(0.025), pytest.approx(0.010))
    assert (record.tf32_products, record.own_products) == (pytest.approx(0.002), pytest.approx(0.003))
    assert (record.to_device, record.communication) == (pytest.approx(0.005), pytest.approx(0.010))
    assert record.waits == pytest.approx(0.018)
    assert record.idle_by_part == {"head": pytest.approx(0.020), BACKWARD: pytest.approx(0.015)}
    assert record.longest[0] == ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32", pytest.approx(0.010), 1.0)


def test_the_split_adds_up_to_the_iteration() -> None:
    profile = profile_step(workload(Net(nn.Identity(), WIDTH), 1, SIZE, CPU, HALF, load=lambda: None), 2)
    split, formats = tables(profile)
    assert {"forward/backbone", "backward/backbone", "optimizer"} <= {row[0] for row in split.rows}
    assert sum(row[2] for row in split.rows) == pytest.approx(1.0, abs=0.01)
    assert formats.rows[0][0] == "in half precision"
    assert formats.rows[0][1] > 0.9
