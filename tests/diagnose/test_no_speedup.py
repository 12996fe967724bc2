"""`diagnose no-speedup`: each reason is named first in a run that has it, and a healthy run shows none."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bevctl.diagnose.bench_limits import read_pair
from bevctl.diagnose.report import Status
from bevctl.errors import BevctlError
from tests.conftest import Outcome
from tests.engine.disk import write_run_files
from tests.preflight import fake_nvml
from tests.runs.logs import mmcv_line, mmcv_message, write

from .cases import CRASHING_FP16, ask, ask_log, evidence, found, header, mmcv_config, own_run, the, windows

FP16 = mmcv_config(4, more=CRASHING_FP16)
FP32 = mmcv_config(4, more="fp16 = None\n")
MAP = {"loss/map/divider/focal": "0.4700"}


def _log(path: Path, config: str, gpu: str = "Tesla V100-SXM2-32GB", **items: str) -> Path:
    return write(path, [*header(config, "0,1", gpu), *windows(30, **items)])


def _against(folder: Path, half: str = FP16, gpu: str = "Tesla V100-SXM2-32GB", **items: str) -> Any:
    """The answer about a run in FP16 beside one in FP32 that takes 0.611 s an iteration and 9 GiB."""
    other = _log(folder / "fp32.log", FP32, gpu)
    return ask("no-speedup", _log(folder / "fp16.log", half, gpu, **{"memory": "6000", **items}), against=other)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_run_that_is_faster_is_clear(tmp_path: Path, swapped: bool) -> None:
    other = _log(tmp_path / "fp32.log", FP32)
    half = _log(tmp_path / "fp16.log", FP16, memory="6000", time="0.420")
    answer = ask("no-speedup", other, against=half) if swapped else ask("no-speedup", half, against=other)
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    told = the(answer, "SPEED102")
    assert told.title == "Half precision computes 1.48 times as fast as the other run"  # 0.591 / 0.400
    assert "1.3 to 2 times FP32" in evidence(told)


def test_a_run_that_is_smaller_and_no_faster(tmp_path: Path) -> None:
    assert found(_against(tmp_path, time="0.670")) == {"PREC106": "warn"}


@pytest.mark.parametrize(("time", "expected"), [(0.3, {}), (0.49, {"PREC106": "warn"})])
@pytest.mark.parametrize("swapped", [False, True])
def test_runs_that_do_not_tell_their_memory_are_compared_by_time(
    tmp_path: Path, time: float, expected: dict[str, str], swapped: bool
) -> None:
    runs = {"fp32": own_run(tmp_path / "fp32", {"iter_time_s": [0.5] * 90}, 90)}
    runs["bf16"] = own_run(tmp_path / "bf16", {"iter_time_s": [time] * 90}, 90)
    for name, run in runs.items():
        text = (run / "run.json").read_text().replace('"precision": "fp16"', f'"precision": "{name}"')
        (run / "run.json").write_text(text)
    pair = (runs["fp32"], runs["bf16"]) if swapped else (runs["bf16"], runs["fp32"])
    answer = ask("no-speedup", pair[0], against=pair[1])
    assert found(answer) == expected
    assert f"Half precision computes {0.5 / time:.2f} times as fast" in the(answer, "SPEED102").title


def test_a_run_that_cannot_be_compared_is_said_to_be_so(tmp_path: Path) -> None:
    short = own_run(tmp_path / "fp32", {"iter_time_s": [0.5] * 2}, 2)
    answer = ask("no-speedup", own_run(tmp_path / "fp16", {"iter_time_s": [0.5] * 60}, 60), against=short)
    assert answer.status is Status.INCONCLUSIVE
    assert "cannot be compared (3 iteration times of each" in answer.looked_at[-1]


def test_the_baseline_in_tf32_is_told(tmp_path: Path) -> None:
    answer = _against(tmp_path, gpu="NVIDIA A100-SXM4-40GB", time="0.600")
    assert "PREC105" in [finding.id for finding in answer.findings]
    assert "1.1 to 1.5 times" in evidence(the(answer, "SPEED102"))


def test_half_precision_that_is_off_or_without_effect(tmp_path: Path) -> None:
    answer = ask("no-speedup", _log(tmp_path / "a.log", FP32))
    assert (found(answer), answer.findings[0].id) == ({"PREC101": "warn"}, "PREC101")
    assert found(_against(tmp_path, memory="9216", time="0.605"))["PREC001"] == "fail"


def test_a_lost_head_is_no_gain(tmp_path: Path) -> None:
    other = write(tmp_path / "fp32.log", [*header(FP32, "0,1"), *windows(30, **MAP)])
    answer = ask("no-speedup", _log(tmp_path / "fp16.log", FP16, memory="6000", time="0.420"), against=other)
    assert (answer.findings[0].id, answer.findings[0].severity.value) == ("TASK002", "fail")


def test_waiting_for_data_and_no_loading_processes(tmp_path: Path) -> None:
    config = FP16.replace("workers_per_gpu=2", "workers_per_gpu=0")
    answer = ask("no-speedup", _log(tmp_path / "a.log", config, time="3.100", data_time="2.400"))
    assert found(answer) == {"LOAD001": "warn", "SPEED101": "warn"}
    assert "77%" in the(answer, "LOAD001").title
    # 1 / (24/31 + 7/31/1.5), 31/24
    assert "1.08 times as fast, and no time at all for it 1.3 times" in evidence(the(answer, "LOAD001"))
    assert answer.tables[0].rows[0][:2] == ("waiting for data", pytest.approx(2.4))


def test_more_workers_are_a_setting_of_our_own_runs(tmp_path: Path) -> None:
    run = own_run(tmp_path, {"loss": [2.0] * 200, "iter_time_s": [0.9] * 200, "data_time_s": [0.5] * 200}, 200)
    assert the(ask("no-speedup", run), "LOAD001").fix[0].set == {"train.workers": 8}


@pytest.mark.parametrize(("data_time", "severity"), [("0.010", "info"), ("0.120", "warn")])
def test_no_workers_where_nothing_waits(tmp_path: Path, data_time: str, severity: str) -> None:
    config = FP16.replace("workers_per_gpu=2", "workers_per_gpu=0")
    answer = ask("no-speedup", _log(tmp_path / "a.log", config, data_time=data_time))
    assert the(answer, "SPEED101").severity.value == severity


@pytest.mark.parametrize("seconds", ["9.500", "11.000"])
def test_computing_that_is_slow_against_any_model_of_this_kind(tmp_path: Path, seconds: str) -> None:
    answer = ask("no-speedup", _log(tmp_path / "a.log", FP16, time=seconds, data_time="0.400"))
    assert found(answer) == {"TIME002": "warn"}
    assert "do not help" in evidence(the(answer, "TIME002"))


@pytest.mark.parametrize(
    ("batch", "gpu", "time", "severity"),
    [
        (1, "NVIDIA H200", "0.605", "warn"),
        (2, "NVIDIA A100-SXM4-40GB", "0.605", "warn"),
        (1, "NVIDIA H200", "0.420", None),
        (4, "NVIDIA H200", "0.605", None),
        (1, "Tesla V100-SXM2-32GB", "0.605", None),
    ],
)
def test_few_samples_on_a_fast_card(tmp_path: Path, batch: int, gpu: str, time: str, severity: str | None) -> None:
    answer = _against(tmp_path, mmcv_config(batch, more=CRASHING_FP16), gpu, time=time)
    assert found(answer).get("SPEED103") == severity


@pytest.mark.parametrize(
    ("width", "time", "severity"), [(90, "0.605", "warn"), (90, "0.420", "info"), (96, "0.605", None)]
)
def test_widths_for_tensor_cores(tmp_path: Path, width: int, time: str, severity: str | None) -> None:
    neck = f"model = dict(neck=dict(in_channels=[3, 64], out_channels={width}),"
    answer = _against(tmp_path, FP16.replace("model = dict(", neck), time=time)
    findings = [finding for finding in answer.findings if finding.id == "SPEED104"]
    assert [finding.severity.value for finding in findings] == ([severity] if severity is not None else [])
    assert all(f"model.neck.out_channels = {width}" in evidence(finding) for finding in findings)


@pytest.mark.parametrize("more", ["detect_anomaly = True\n", "deterministic = True\n"])
def test_switches_that_cost_time(tmp_path: Path, more: str) -> None:
    answer = ask("no-speedup", _log(tmp_path / "a.log", FP16 + more))
    assert found(answer) == {"SPEED105": "warn"}


@pytest.mark.parametrize(("minutes", "is_found"), [(5, True), (1, False)])
def test_time_for_evaluations(tmp_path: Path, minutes: float, is_found: bool) -> None:
    pause = minutes * 60
    lines = [mmcv_line(1, inner, inner) for inner in range(50, 401, 50)]
    lines.append(mmcv_message(400 + pause, "Epoch(val) [1][100]\tmAP: 0.2100"))
    lines += [mmcv_line(2, inner, 400 + pause + inner) for inner in range(50, 401, 50)]
    answer = ask_log("no-speedup", tmp_path, [*header(FP16, "0"), *lines])
    assert found(answer) == ({"SPEED106": "warn"} if is_found else {})


def test_without_anything_to_compare_it_is_inconclusive(tmp_path: Path) -> None:
    answer = ask("no-speedup", _log(tmp_path / "a.log", FP16))
    assert (answer.status, found(answer)) == (Status.INCONCLUSIVE, {})
    assert "--bench" in answer.looked_at[-1]


def _result(precision: str, step: float, backbone: float, head: float, **more: float) -> dict[str, Any]:
    parts = {"camera": backbone / 3, "head": head / 3}
    split = {
        "data": 0.0,
        "forward": sum(parts.values()),
        "backward": 2 * sum(parts.values()),
        "optimizer": 0.004,
        "forward_by_part": parts,
        "backward_by_part": {name: 2 * seconds for name, seconds in parts.items()},
    }
    timed = {"median": step, "p10": step, "p90": step, "n": 20}
    return {"precision": precision, "batch": 4, "step_s": timed, "allocated_bytes": None, "split": split, **more}


def _bench(path: Path, *results: dict[str, Any]) -> Path:
    return write(path, [json.dumps({"schema": "bevctl.bench/1", "results": list(results)})])


def test_parts_that_do_not_gain_bound_the_whole(tmp_path: Path) -> None:
    path = _bench(tmp_path / "b.json", _result("fp32", 0.304, 0.120, 0.180), _result("fp16", 0.284, 0.060, 0.180))
    pair = read_pair([path])
    assert pair.ceiling == pytest.approx(0.304 / 0.184)  # head and optimizer keep their time
    answer = ask("no-speedup", None, bench=(path,))
    assert found(answer) == {"SPEED107": "warn"}
    told = the(answer, "SPEED107")
    assert told.title == "Half precision gives 1.07 times; the parts allow at most 1.65 times"
    assert told.evidence[1].where == "head, backward"
    assert answer.tables[0].rows[0][0] == "head, backward"


def test_a_step_in_which_every_part_gains(tmp_path: Path) -> None:
    half = _result("fp16", 0.160, 0.060, 0.090)
    half["split"]["optimizer"] = 0.002
    path = _bench(tmp_path / "b.json", _result("fp32", 0.304, 0.120, 0.180), half)
    answer = ask("no-speedup", None, bench=(path,))
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    assert the(answer, "SPEED107").title == "Half precision gives 1.90 times, and no part holds it back"


@pytest.mark.parametrize(("kernel", "host", "is_found"), [(0.09, 0.2, True), (0.19, 0.2, False), (0.09, 0.1, False)])
def test_a_host_that_launches_too_slowly(tmp_path: Path, kernel: float, host: float, is_found: bool) -> None:
    half = _result("fp16", 0.21, 0.060, 0.090, kernel_s=kernel, host_s=host, launches=14000.0)
    path = _bench(tmp_path / "b.json", _result("fp32", 0.304, 0.120, 0.180), half)
    answer = ask("no-speedup", None, bench=(path,))
    assert found(answer) == ({"SPEED108": "warn"} if is_found else {})
    if is_found:
        assert "200.0 ms for 14000 launches, the GPU needs 90.0 ms" in the(answer, "SPEED108").title


def test_documents_of_one_precision_each_go_together(tmp_path: Path) -> None:
    one = _bench(tmp_path / "a.json", _result("tf32", 0.2, 0.1, 0.1))
    two = _bench(tmp_path / "b.json", _result("bf16", 0.15, 0.05, 0.1))
    assert read_pair([one, two]).speed == pytest.approx(0.2 / 0.15)
    with pytest.raises(BevctlError, match="no batch was measured both"):
        read_pair([one])


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "bevctl.bench/1"}', '{"schema": "bevctl.bench/1", "results": [3]}']
)
def test_files_that_are_no_benchmark(tmp_path: Path, text: str) -> None:
    with pytest.raises(BevctlError):
        read_pair([write(tmp_path / "b.json", [text])])


@pytest.mark.parametrize(("events", "severity"), [(0x40, "warn"), (0x04, "info"), (0x01, None)])
def test_a_clock_that_is_held_back_while_the_run_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: int, severity: str | None
) -> None:
    fake_nvml.install(monkeypatch, fake_nvml.h200(clock_events=events))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = own_run(tmp_path, {"iter_time_s": [0.5] * 60}, 60)
    assert "SPEED109" not in {finding.id for finding in ask("no-speedup", run).findings}, "it has ended"
    meta = json.loads((run / "run.json").read_text()) | {"status": "running", "host": socket.gethostname()}
    (run / "run.json").write_text(json.dumps(meta))
    monkeypatch.setattr(time, "time", lambda: 1.79e9 + 60)
    told = {finding.id: finding.severity.value for finding in ask("no-speedup", run).findings}
    assert told.get("SPEED109") == severity


def test_the_command(invoke: Callable[..., Outcome], tmp_path: Path) -> None:
    path = _log(tmp_path / "a.log", FP16, time="9.500")
    result = invoke("diagnose", "no-speedup", path, "--json")
    assert (result.code, result.document["findings"][0]["id"]) == (1, "TIME002")
    assert result.document["time"][1]["what"] == "computing"
    bench = _bench(tmp_path / "b.json", _result("fp32", 0.3, 0.1, 0.2), _result("fp16", 0.2, 0.05, 0.1))
    clear = invoke("diagnose", "no-speedup", "--bench", bench)
    assert clear.code == 0
    assert clear.out.startswith("CLEAR  no-speedup: Half precision gives 1.50 times; the parts allow at most")
    wrong = invoke("diagnose", "nan", path, "--bench", bench)
    assert (wrong.code, "--bench belongs to" in wrong.err) == (2, True)


@pytest.mark.usefixtures("one_thread")
def test_a_config_is_profiled_and_remedies_are_tried(invoke: Callable[..., Outcome], tmp_path: Path) -> None:
    config = write_run_files(tmp_path)
    result = invoke("diagnose", "no-speedup", "--config", config, "--profile", "2", "--device", "cpu", "--json")
    document = result.document
    ids = [finding["id"] for finding in document["findings"]]
    assert ids[0] == "SPEED110", "it trains in FP32"
    told = next(finding for finding in document["findings"] if finding["id"] == "SPEED119")
    assert told["evidence"][0]["what"].startswith("Half precision can give at most ")
    assert {"forward/encoders.lidar", "backward/decoder", "optimizer"} <= {row["what"] for row in document["split"]}
    tried = {row["what"]: row["ratio"] for row in document["tried"]}
    assert tried["as it is"] == 1.0
    assert tried["batch 4 instead of 2"] > 0
    assert invoke("diagnose", "oom", "--config", config, "--profile", "2").code == 2
