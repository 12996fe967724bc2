"""`bevctl diagnose nan --replay` on runs that met an injected fault: the cause, the module, the remedy."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bevctl.cli.main import run
from bevctl.console import Console
from bevctl.diagnose import replay, trials
from bevctl.diagnose.bundle import open_bundle
from bevctl.engine.incident import find_incidents
from bevctl.errors import ExitCode

from ..conftest import Outcome
from . import faults

Invoke = Callable[..., Outcome]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trials, "FOLLOWING", 1)


def _train(invoke: Invoke, config: Path, *options: str) -> Outcome:
    return invoke("train", config, "--work-dir", "run", "--no-preflight", *options)


def _replay(invoke: Invoke, *options: str | Path) -> dict[str, Any]:
    done = invoke("diagnose", "nan", "run", "--replay", "--json", *options)
    assert done.code == ExitCode.FINDINGS, done.err
    assert done.document["status"] == "found"
    transient = done.document["findings"][0]["id"] == "NAN205"
    assert transient or any(f" {words} " in done.document["looked_at"][1] for words in ("bit for bit", "rank 1"))
    return done.document


def _cures(finding: dict[str, Any]) -> list[dict[str, Any]]:
    return [remedy["set"] for remedy in finding["fix"] if remedy["verified"] is True]


def test_a_weight_too_large_for_fp16(invoke: Invoke, data: Path) -> None:
    config = faults.write_config(data, Path("c.yaml"), **{"precision.dtype": "fp16", "precision.init_scale": 256.0})
    name = "heads.object.shared_conv.weight"
    weights = faults.scaled_weights(faults.lidar_config(data), name, 1e5, Path("scaled.pth"))
    assert _train(invoke, config, "--load-from", str(weights), "--max-iters", "1").code == ExitCode.NONFINITE
    document = _replay(invoke, "--write-fix", "fix.yaml")
    assert (document["iteration"], document["class"]) == (1, "forward")
    finding = document["findings"][0]
    assert finding["id"] == "NAN201"
    assert "FP16 overflow in heads.object.shared_conv: aten.convolution" in finding["title"]
    first = finding["evidence"][0]
    assert first["where"].startswith("heads.object.shared_conv, bevctl/models/transfusion.py:")
    assert "float16 2x16x8x8" in first["what"]
    assert "infinite" in first["what"]
    outcomes = {next(iter(remedy["set"])): remedy for remedy in reversed(finding["fix"])}
    modules = [r for r in finding["fix"] if "precision.fp32_modules" in r["set"]]
    assert [(r["set"]["precision.fp32_modules"], r["verified"]) for r in modules] == [
        (["heads.object"], True),
        (["heads.object.shared_conv"], False),  # its sound FP32 output overflows where the next module rounds it
    ]
    assert modules[0]["step_time"] > 0
    assert {"precision.dtype": "bf16"} in _cures(finding)
    assert outcomes["precision.loss_scale"]["verified"] is False
    assert outcomes["data.skip_samples"]["verified"] is False
    assert "optim.lr" not in outcomes  # no step lies before the first
    closest = document["headroom"][0]  # with heads.object in FP32
    assert 0 < closest["largest"] < 65000
    assert closest["of_limit"] == pytest.approx(closest["largest"] / 65504)
    assert not closest["module"].startswith("heads.object")
    again = invoke("train", "--work-dir", "run", "--resume", "auto", "--set", "fix.yaml", "--max-iters", "4", "--json")
    assert again.code == ExitCode.OK, again.err
    assert "Kept in FP32: heads.object" in again.err
    assert [path.name for path in find_incidents(Path("run"))] == ["1"]


def test_a_learning_rate_that_explodes(invoke: Invoke, data: Path) -> None:
    config = faults.write_config(data, Path("c.yaml"), **{"optim.lr": 500.0, "optim.clip": None})
    _train(invoke, config, "--max-iters", "6")
    document = _replay(invoke)
    finding = document["findings"][0]
    assert finding["id"] == "NAN207"
    assert finding["evidence"][0]["where"] == "loss by iteration"
    assert document["looked_at"][2].endswith("those that change earlier steps, from iteration 0 on.")
    rates = [remedy for remedy in finding["fix"] if "optim.lr" in remedy["set"]]
    assert rates[0]["verified"] is True
    assert rates[0]["set"]["optim.lr"] < 500.0
    assert rates[0]["resume"] == ""
    told = invoke("diagnose", "nan", "run", "--replay", "--write-fix", "fix.yaml")
    assert "cures it, from the start on" in " ".join(told.out.split())
    assert "Start anew with it: bevctl train run/config.yaml --work-dir run_2 --set fix.yaml" in told.err
    anew = invoke("train", "run/config.yaml", "--work-dir", "run_2", "--set", "fix.yaml", "--no-preflight")
    assert anew.code == ExitCode.OK
    assert find_incidents(Path("run_2")) == []


def test_a_logarithm_of_zero_is_a_defect_of_the_code(
    invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.use(faults.built_with(lambda bev: bev + (bev.relu() * 0).log()), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    finding = _replay(invoke)["findings"][0]
    assert finding["id"] == "NAN202"
    assert finding["title"].startswith("aten.log.default in decoder")
    assert "test_replay.py" in finding["evidence"][0]["where"]
    assert "log_softmax" in finding["fix"][-1]["why"]
    assert _cures(finding) == []


def test_gradients_whose_norm_alone_overflows(invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.use(faults.built_with(lambda bev: bev + _with_gradient(bev, 1e25)), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    finding = _replay(invoke)["findings"][0]
    assert finding["id"] == "NAN207"
    assert "the norm of all is not" in finding["title"]


def _with_gradient(bev: Tensor, factor: float) -> Tensor:
    """Zeros whose slope is `factor`."""
    return (bev - bev.detach()) * factor


def test_a_root_whose_slope_is_infinite_shows_in_the_backward_pass_only(
    invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.use(faults.built_with(lambda bev: bev + (bev * 0).abs().sqrt()), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    document = _replay(invoke)
    finding = document["findings"][0]
    assert (finding["id"], document["class"]) == ("NAN202", "backward")
    assert "decoder" in finding["evidence"][0]["where"]
    assert "backward" in finding["evidence"][0]["what"]
    assert any("add a small number under the root" in remedy["why"] for remedy in finding["fix"])


def test_a_module_that_hides_nan(invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.use(faults.built_with(lambda bev: bev + (bev / (bev - bev)).nan_to_num(0.0, 0.0, 0.0)), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    findings = {finding["id"]: finding for finding in _replay(invoke)["findings"]}
    assert "aten.div" in findings["NAN202"]["title"]
    assert "nan_to_num" in findings["NAN208"]["title"]


def test_a_fault_that_does_not_come_again(invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[int] = []

    def strike(bev: Tensor) -> Tensor:
        struck.append(1)
        return bev / 0 if len(struck) == 2 else bev

    faults.use(faults.built_with(strike), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    assert _train(invoke, config, "--max-iters", "4").code == ExitCode.OK
    document = _replay(invoke)
    finding = document["findings"][0]
    assert (finding["id"], finding["severity"]) == ("NAN205", "warn")
    assert document["iteration"] == 2
    assert {"recorded", "replayed", "ECC", "Xid"} <= {evidence["where"] for evidence in finding["evidence"]}
    assert _cures(finding) == []


def test_a_sample_with_an_infinite_box(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = faults.write_data(tmp_path / "data", samples=4)
    faults.spoil_box(data, 2, float("inf"), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "2")
    finding = _replay(invoke, "--write-fix", "fix.yaml")["findings"][0]
    assert finding["id"] == "NAN203"
    assert finding["title"] == "The data of sample sample-2 cannot be learned from"
    assert finding["evidence"][0]["where"] == "sample-2"
    assert _cures(finding) == [{"data.skip_samples": ["sample-2"]}]
    assert _train(invoke, config, "--resume", "auto", "--set", "fix.yaml").code == ExitCode.OK


def test_a_sample_whose_box_has_a_negative_length(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = faults.write_data(tmp_path / "data", samples=4)
    faults.spoil_box(data, 2, -1.0, monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "2")
    finding = _replay(invoke)["findings"][0]
    assert {"data.skip_samples": ["sample-2"]} in _cures(finding)


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("moments", {}),
        ("scaler", {"precision.dtype": "fp16", "precision.init_scale": 256.0}),
    ],
)
def test_a_state_that_was_spoiled_before(invoke: Invoke, data: Path, part: str, options: dict[str, object]) -> None:
    def spoil(content: dict[str, Any]) -> None:
        if part == "moments":  # the first step makes weights of it
            content["optimizer"]["state"][0]["exp_avg"].flatten()[0] = torch.nan
        else:
            content["scaler"]["scale"] = float("inf")

    config = faults.write_config(data, Path("c.yaml"), **options)
    assert _train(invoke, config, "--max-iters", "1").code == ExitCode.OK
    assert _train(invoke, config, "--resume", "auto", "--max-iters", "2").code == ExitCode.OK
    faults.corrupt(Path("run/iter_2.pth"), spoil)
    _train(invoke, config, "--resume", "iter_2.pth", "--max-iters", "5")
    finding = _replay(invoke)["findings"][0]
    assert finding["id"] == "NAN204"
    way_back = finding["fix"][0]
    assert (way_back["set"], way_back["verified"]) == ({}, True)
    assert "--resume iter_1.pth" in way_back["why"]


def test_gradients_of_another_rank(invoke: Invoke, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share their gradients, so that the recorded rank may be the healthy one."""
    faults.use(faults.built_with(lambda bev: bev + (bev * 0).abs().sqrt()), monkeypatch)
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    bundle = find_incidents(Path("run"))[0]
    faults.use(faults.built_with(lambda bev: bev + (bev * 0).abs().sqrt() if struck else bev), monkeypatch)
    struck: list[int] = []

    def opened(folder: Path, device: str, rank: int | None = None) -> Any:
        struck[:] = [1] * (rank or 0)
        return open_bundle(folder, device, rank)

    monkeypatch.setattr(replay, "open_bundle", opened)
    faults.as_second_rank(bundle)
    document = _replay(invoke)
    assert "It is rank 1 whose step is not finite" in document["looked_at"][1]
    assert document["findings"][0]["id"] == "NAN202"


def test_batches_that_were_too_large_to_keep_are_made_again(invoke: Invoke, tmp_path: Path) -> None:
    data = faults.write_data(tmp_path / "data", samples=4)
    config = faults.write_config(data, Path("c.yaml"), **{"optim.lr": 1e6})
    _train(invoke, config, "--max-iters", "2")
    bundle = find_incidents(Path("run"))[0]
    (bundle / "batch_0.pth").unlink()
    assert _replay(invoke)["findings"][0]["id"] == "NAN207"
    data.rename(tmp_path / "elsewhere")
    gone = invoke("diagnose", "nan", "run", "--replay")
    assert gone.code == 2
    assert (
        f"holds no batches, and they cannot be made again. The run's data set is not here (The data root {data}"
        in gone.err
    )


def test_a_bundle_is_enough_and_keeps_its_number_format(invoke: Invoke, incident: Path) -> None:
    """Sent to somebody else, without the run; `auto` is what it was where it was recorded."""
    shutil.copytree(find_incidents(incident)[0], "sent")

    def in_bf16(content: dict[str, Any]) -> None:
        content["meta"]["config"]["precision"]["dtype"] = "auto"
        content["meta"]["setting"]["precision"] = "bf16"

    faults.corrupt(Path("sent/state.pth"), in_bf16)
    done = invoke("diagnose", "nan", "sent", "--replay", "--json")
    assert done.code == ExitCode.FINDINGS, done.err
    finding = done.document["findings"][0]
    assert {"precision.dtype": "fp32"} in [remedy["set"] for remedy in finding["fix"]]
    assert "optim.lr" in str(finding["fix"])


def test_what_cannot_be_replayed_is_said_in_a_sentence(invoke: Invoke, data: Path) -> None:
    config = faults.write_config(data, Path("c.yaml"))
    _train(invoke, config, "--max-iters", "1")
    healthy = invoke("diagnose", "nan", "run", "--replay")
    assert (healthy.code, "No incident is recorded in run" in healthy.err) == (2, True)
    nowhere = invoke("diagnose", "nan", "nowhere", "--replay")
    assert (nowhere.code, "nowhere does not exist" in nowhere.err) == (2, True)
    nothing = invoke("diagnose", "nan", "--replay", "--checkpoint", "run/iter_1.pth")
    assert (nothing.code, "needs a run" in nothing.err) == (2, True)


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """A run with an incident."""
    folder = tmp_path_factory.mktemp("bundle")
    config = faults.write_config(data, folder / "c.yaml", **{"optim.lr": 1e6})
    options = ["--work-dir", str(folder / "run"), "--no-preflight", "--max-iters", "2"]
    run(["train", str(config), *options], Console(io.StringIO(), io.StringIO()))
    return folder / "run"


@pytest.mark.parametrize("name", ["state.pth", "incident.json", "batch_0.pth"])
def test_a_truncated_bundle_is_said_in_a_sentence(invoke: Invoke, incident: Path, name: str) -> None:
    shutil.copytree(incident, "run")
    file = find_incidents(Path("run"))[0] / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    done = invoke("diagnose", "nan", "run", "--replay", "--json")
    assert (done.code, done.document["status"]) == (2, "error")
    assert name in done.err
    assert "defect" not in done.err


@pytest.mark.parametrize(
    "change",
    [
        {"world": 0},
        {"rank": 1},
        {"rank": "0"},
        {"iteration": None},
        {"losses": {"loss/a": "high"}},
        {"ring": [1, 2]},
        {"schema": "bevctl.incident/9"},
    ],
)
def test_a_bundle_that_was_tampered_with_is_refused(invoke: Invoke, incident: Path, change: dict[str, object]) -> None:
    shutil.copytree(incident, "run")
    file = find_incidents(Path("run"))[0] / "incident.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    done = invoke("diagnose", "nan", "run", "--replay")
    assert (done.code, "incident.json" in done.err) == (2, True), done.err


def test_a_state_without_its_random_numbers_is_refused(invoke: Invoke, incident: Path) -> None:
    shutil.copytree(incident, "run")
    faults.corrupt(find_incidents(Path("run"))[0] / "state.pth", lambda content: content.update(rng=[]))
    done = invoke("diagnose", "nan", "run", "--replay")
    assert (done.code, "cannot be restored: IndexError" in done.err) == (2, True), done.err
