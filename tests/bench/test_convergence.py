"""The convergence study at a tiny size, and its arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scipy import stats

from tests.bench import bench_convergence
from tests.bench.bench_convergence import Run, difference
from tests.conftest import Outcome
from tests.test_end_to_end import NANO


def run_of(arm: str, seed: int, score: float) -> Run:
    return Run(arm, seed, dict.fromkeys(bench_convergence.METRICS, score), [1.0], 1.0, "CPU", {})


def test_differences_are_paired_by_seed() -> None:
    """Against scipy's paired t-test; a seed that FP32 lacks does not count."""
    plain, half = {0: 0.50, 1: 0.60, 2: 0.40}, {0: 0.51, 1: 0.58, 2: 0.43, 9: 0.0}
    runs = [run_of("fp16", seed, score) for seed, score in half.items()]
    runs += [run_of("fp32", seed, score) for seed, score in plain.items()]
    found = difference("fp16", "mAP", runs)
    expected = stats.ttest_rel([half[seed] for seed in plain], list(plain.values())).confidence_interval(0.95)
    assert found.each == pytest.approx([0.01, -0.02, 0.03])
    assert found.interval == pytest.approx((expected.low, expected.high))
    assert found.agrees


@pytest.mark.parametrize(("gain", "agrees"), [(0.002, True), (-0.01, False)])
def test_a_steady_difference_must_be_small(gain: float, agrees: bool) -> None:
    scores = {seed: 0.5 + 0.1 * seed for seed in range(3)}
    runs = [run_of("fp32", seed, score) for seed, score in scores.items()]
    runs += [run_of("bf16", seed, score + gain * (1 + 0.01 * seed)) for seed, score in scores.items()]
    assert difference("bf16", "NDS", runs).agrees is agrees


def test_one_seed_has_no_interval() -> None:
    found = difference("bf16", "NDS", [run_of("fp32", 0, 0.5), run_of("bf16", 0, 0.4)])
    assert found.interval is None
    assert not found.agrees


def test_gaps_in_a_curve() -> None:
    assert bench_convergence.smoothed([None, 2.0, None, 4.0])[1:] == [2.0, 2.0, 3.0]
    assert math.isnan(bench_convergence.smoothed([None])[0])


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"bevctl no_such_command ended with 2:\n(.|\n)*no_such_command"):
        bench_convergence.bevctl(["no_such_command"], tmp_path / "log")


def test_a_study_of_two_arms_and_two_seeds(
    synth_root: Path, tmp_path: Path, invoke: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def in_process(arguments: Sequence[str], log: Path) -> None:
        calls.append(arguments)
        outcome = invoke(*arguments)
        log.write_text(outcome.err)
        assert outcome.code == 0, outcome.err

    monkeypatch.setattr(bench_convergence, "bevctl", in_process)
    folders = ["--data", str(synth_root), "--out", str(tmp_path / "out"), "--work-dir", str(tmp_path / "runs")]
    choice = ["--arms", "fp32", "bf16", "--seeds", "0", "1", "--epochs", "1", "--jobs", "1", "--device", "cpu"]
    sizes = [word for value in [*NANO, "train.batch=6", "data.sweeps=0"] for word in ("--set", value)]
    assert bench_convergence.main([*folders, *choice, *sizes]) in (0, 1)
    assert len(calls) == 4
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    runs = document["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [("fp32", 0), ("fp32", 1), ("bf16", 0), ("bf16", 1)]
    first, other, half, _ = (run["losses"][0] for run in runs)
    assert half != first
    assert half == pytest.approx(first, rel=0.02), "the same weights and samples"
    assert other != first, "another seed"
    assert [(d["arm"], d["metric"]) for d in document["differences"]] == [("bf16", m) for m in ("mAP", "NDS", "mIoU")]
    assert len(document["differences"][0]["each"]) == 2
    assert (tmp_path / "out" / "losses.png").stat().st_size > 1000

    bench_convergence.main([*folders, *choice, *sizes])
    assert len(calls) == 4, "finished runs are read, not repeated"
