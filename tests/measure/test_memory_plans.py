"""Plans: what goes with a batch, times and costs, what fits, and the chance of running out of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bevctl.config.schema import Config
from bevctl.errors import BevctlError
from bevctl.measure import memory_plans
from bevctl.measure.memory import Need
from bevctl.measure.memory_chance import chance_of_running_out
from bevctl.measure.memory_inputs import sizes_of
from bevctl.measure.memory_plans import MARGIN, Job, Planner, best_fit
from bevctl.measure.memory_trace import SampleSize
from bevctl.measure.step_times import StepSetting, StepTime, StepTimes, read_times
from tests.models.nano import nano_config

JOB = Job(samples=8000)
SMALL, LARGE = SampleSize(1000, (400,) * 5), SampleSize(4000, (1600,) * 5)


class Linear:
    """A prediction that can be done in the head: a fixed part, and voxels by batch; recomputing saves a quarter."""

    def __init__(self, config: Config, size: SampleSize, gpus: int = 1) -> None:
        del config, gpus
        self._size = size

    def need(self, precision: str, batch: int, checkpointing: tuple[str, ...]) -> Need:
        sample = self._size.sites[0] * (4 if precision == "fp32" else 2) * (0.75 if checkpointing else 1.0)
        size = round(10_000 + batch * sample)
        return Need({"parameters": size}, size, size, size)


@pytest.fixture(autouse=True)
def _linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plans, "Predictor", Linear)


def planner(card: int | None = None, times: StepTimes | None = None, job: Job = JOB, changes: Any = ()) -> Planner:
    config = nano_config(**{"train.batch": 4, "optim.lr": 2e-4, "optim.warmup": 500, **dict(changes)})
    sizes = sizes_of([SMALL] * 9 + [LARGE], "synthetic")
    return Planner(config, sizes, times or StepTimes({}), job, card)


def test_plans_carry_what_goes_with_their_batch() -> None:
    plans = {plan.name: plan for plan in planner().plans()}
    assert {"fp16", "fp16_batch2", "fp32"} <= set(plans)
    letters = {plan.letter: name for name, plan in plans.items() if plan.letter is not None}
    assert letters == {"A": "fp16_batch4", "B": "fp16_batch8_checkpoint", "C": "fp16_batch2"}
    small, same, large = (plans[name] for name in ("fp16", "fp16_batch4", "fp16_batch8"))
    assert (small.accumulate, small.lr, small.warmup) == (4, 2e-4, 500)  # the same samples a step
    assert (same.accumulate, same.lr, same.workers) == (1, 2e-4, 4)
    assert (large.accumulate, large.lr, large.warmup, large.workers) == (1, 2.83e-4, 700, 2)
    assert "check accuracy" in large.risk
    assert "one sample" in small.risk
    assert large.settings()["optim"]["lr_scaling"] == "none"


def test_the_linear_rule_is_kept() -> None:
    assert planner(changes={"optim.lr_scaling": "linear"}).plan("fp16", 8, ()).lr == 4e-4


def test_times_and_costs_follow_from_one_measurement() -> None:
    times = StepTimes({StepSetting("fp16", 4, False): 0.5})
    made = planner(times=times, job=Job(samples=8000, gpus=2, price=3.0), changes={"train.epochs": 3})
    plan = made.plan("fp16", 4, ())
    assert plan.step == StepTime(0.5, measured=True)
    assert (plan.steps, plan.epoch_s, plan.total_s) == (1000, 500.0, 1500.0)
    assert (plan.gpu_hours, plan.cost) == (pytest.approx(1500 * 2 / 3600), pytest.approx(2.5))
    document = plan.document()
    assert (document["s_per_iter"], document["total_s"], document["s_per_iter_measured"]) == (0.5, 1500.0, True)
    other = made.plan("fp32", 4, ())
    assert other.step is not None
    assert not other.step.measured
    assert other.step.seconds > 0.5
    small = made.plan("fp16", 1, ())
    assert small.step is not None
    assert small.step_s == pytest.approx(4 * small.step.seconds)
    assert made.plan("fp16", 8, ("lidar",)).document()["finish"] is not None


def test_without_a_measurement_there_are_no_times() -> None:
    document = planner().plan("fp16", 4, ()).document()
    assert [document[name] for name in ("s_per_iter", "epoch_s", "total_s", "finish", "gpu_hours", "cost")] == [
        None
    ] * 6


def test_the_fastest_plan_that_fits_with_large_samples_is_chosen() -> None:
    plans = planner().plans()
    assert best_fit(plans, 2**40) is min(plans, key=lambda plan: plan.relative_cost)
    assert best_fit(plans, 10_000) is None
    needs = sorted(plans, key=lambda plan: plan.large)
    tight = best_fit(plans, round(needs[0].large / (1 - MARGIN)) + 1)
    assert tight is needs[0]


def test_a_measured_plan_that_is_faster_is_preferred() -> None:
    known = {StepSetting("fp16", batch, False): 0.01 if batch == 2 else 9.0 for batch in (1, 2, 4, 8)}
    found = best_fit(planner(times=StepTimes(known)).plans(), 2**40)
    assert found is not None
    assert (found.precision, found.batch, found.checkpointing) == ("fp16", 2, ())


def test_a_card_with_room_for_typical_samples_only_may_run_out() -> None:
    plan = planner().plan("fp16", 4, ())
    between = (plan.typical.device + 2 * plan.large) // 3
    assert plan.chance is None
    assert planner(card=2 * plan.large).plan("fp16", 4, ()).chance == 0.0
    chance = planner(card=between).plan("fp16", 4, ()).chance
    assert chance is not None
    assert 0.001 < chance <= 1.0
    assert "runs out of memory" in planner(card=between).plan("fp16", 4, ()).risk


def test_the_chance_of_running_out() -> None:
    assert chance_of_running_out([1.0, 2.0, 3.0], room=6.0, batch=2, steps=10**6) == 0.0
    assert chance_of_running_out([2.0, 2.0], room=3.0, batch=2, steps=1) == 1.0
    one = chance_of_running_out([1.0, 3.0], room=2.0, batch=1, steps=1)
    assert one == pytest.approx(0.5)  # the mean
    assert chance_of_running_out([1.0, 3.0], room=2.0, batch=1, steps=2) == pytest.approx(0.75)
    draws = torch.randint(0, 4, (20000, 16), generator=torch.Generator().manual_seed(0)).float() + 1
    exact = float((draws.sum(dim=1) > 46).float().mean())
    assert chance_of_running_out([1.0, 2.0, 3.0, 4.0], 46.0, 16, 1) == pytest.approx(exact, abs=0.02)


def test_times_are_read_from_a_benchmark(tmp_path: Path) -> None:
    results = [
        {"precision": name, "batch": 2, "step_s": {"median": seconds}}
        for name, seconds in (("fp32", 0.3), ("tf32", 0.2), ("fp16", 0.1))
    ]
    file = tmp_path / "b.json"
    file.write_text(json.dumps({"schema": "bevctl.bench/1", "settings": {"checkpointing": []}, "results": results}))
    times = read_times(file)
    assert times.of(StepSetting("fp32", 2, False)) == StepTime(0.3, measured=True)
    nearest = times.of(StepSetting("fp16", 2, True))
    assert nearest is not None
    assert 0.1 < nearest.seconds < 0.2
    file.write_text('{"schema": "bevctl.bench/1", "results": []}')
    with pytest.raises(BevctlError, match="no measured step"):
        read_times(file)
