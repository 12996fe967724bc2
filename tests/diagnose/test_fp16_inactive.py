"""`diagnose fp16-inactive`: half precision without effect, and savings that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.diagnose.gpu_models import gpu_model
from bevctl.diagnose.report import Status
from tests.runs.logs import mmcv_message, write

from .cases import CRASHING_FP16, ask, ask_log, evidence, found, header, mmcv_config, own_run, the, windows

FP16 = mmcv_config(4, more=CRASHING_FP16)
FP32 = mmcv_config(4, more="fp16 = None\n")
MAP = {"loss/map/drivable_area/focal": "0.9000", "loss/map/divider/focal": "0.4700"}


def _log(path: Path, config: str, gpu: str = "Tesla V100-SXM2-32GB", **items: str) -> Path:
    return write(path, [*header(config, "0,1", gpu), *windows(30, **items)])


@pytest.mark.parametrize(
    ("name", "capability", "tensor_cores", "has_tf32"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0), True, True),
        ("Tesla P40", (6, 1), False, False),
        ("Tesla V100-SXM2-32GB", (7, 0), True, False),
        ("Tesla T4", (7, 5), True, False),
        ("NVIDIA GeForce RTX 4090", (8, 9), True, True),
        ("NVIDIA H100 80GB HBM3", (9, 0), True, True),
        ("NVIDIA GeForce RTX 5090", (12, 0), True, True),
        ("NVIDIA GeForce GTX 1660 Ti", (7, 5), False, False),
        ("NVIDIA GeForce GTX 1080 Ti", (6, 1), False, False),
        ("Tesla P100-PCIE-12GB", (6, 0), False, False),
        ("NVIDIA GeForce RTX 2080 Ti", (7, 5), True, False),
        ("NVIDIA RTX A6000", (8, 6), True, True),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), True, True),
        ("NVIDIA L40S", (8, 9), True, True),
        ("NVIDIA H200", (9, 0), True, True),
        ("NVIDIA B200", (10, 0), True, True),
    ],
)
def test_cards(name: str, capability: tuple[int, int], tensor_cores: bool, has_tf32: bool) -> None:
    model = gpu_model(name)
    assert model is not None
    assert (model.capability, model.tensor_cores, model.has_tf32) == (capability, tensor_cores, has_tf32)


def test_a_card_that_nobody_knows() -> None:
    assert gpu_model("Ascend 910B") is None


def test_a_card_without_tensor_cores(tmp_path: Path) -> None:
    answer = ask("fp16-inactive", _log(tmp_path / "a.log", FP16, "Tesla P40"))
    assert found(answer) == {"PREC102": "warn"}
    assert "compute capability 6.1" in evidence(the(answer, "PREC102"))


def test_memory_and_time_of_fp32(tmp_path: Path) -> None:
    other = _log(tmp_path / "fp32.log", FP32)
    answer = ask("fp16-inactive", _log(tmp_path / "fp16.log", FP16), against=other)
    assert found(answer) == {"PREC001": "fail"}


def test_fp16_that_saves_memory_and_time_is_in_effect(tmp_path: Path) -> None:
    other = _log(tmp_path / "fp32.log", FP32)
    answer = ask("fp16-inactive", _log(tmp_path / "fp16.log", FP16, memory="5600", time="0.420"), against=other)
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    assert "memory x 0.61" in answer.looked_at[-1]


@pytest.mark.parametrize(("gpu", "is_tf32"), [("NVIDIA A100-SXM4-40GB", True), ("NVIDIA GeForce RTX 2080 Ti", False)])
def test_less_memory_and_no_less_time(tmp_path: Path, gpu: str, is_tf32: bool) -> None:
    other = _log(tmp_path / "fp32.log", FP32, gpu)
    half = _log(tmp_path / "fp16.log", FP16, gpu, memory="6000", time="0.670")
    answer = ask("fp16-inactive", half, against=other)
    assert found(answer) == {"PREC106": "warn"}
    assert "computing takes x 1.1" in the(answer, "PREC106").title
    assert ("PREC105" in [finding.id for finding in answer.findings]) == is_tf32


def test_the_lost_map_head_is_no_saving(tmp_path: Path) -> None:
    other = _log(tmp_path / "fp32.log", FP32, loss="2.8200", **MAP)
    lines = [*header(FP16, "0,1"), *windows(30, loss="1.4500", memory="5600", time="0.420")]
    lines.insert(
        8,
        mmcv_message(0.2, "The model and loaded state dict do not match exactly", "WARNING")
        + "\n\nunexpected key in source state_dict: heads.map.classifier.0.weight, heads.map.classifier.1.weight\n",
    )
    answer = ask_log("fp16-inactive", tmp_path, lines, against=other)
    finding = the(answer, "TASK002")
    assert (answer.findings[0], finding.severity.value) == (finding, "fail")
    assert "losses of map are missing" in finding.title
    assert "no gain of FP16" in finding.cause
    assert "a head that was not built: heads.map (2)" in evidence(finding)
    assert "PREC106" not in found(answer)


@pytest.mark.parametrize("logged", [True, False])
def test_a_head_that_another_projects_config_builds(tmp_path: Path, logged: bool) -> None:
    config = tmp_path / "multitask.yaml"
    config.write_text(
        "model:\n  heads:\n    object: {type: TransFusionHead}\n    map: {type: Head}\nfp16: {loss_scale: 512}\n"
    )
    answer = ask_log("fp16-inactive", tmp_path, windows(30, **(MAP if logged else {})), config=str(config))
    assert found(answer) == ({} if logged else {"TASK002": "fail"})


def test_where_fp16_comes_from_is_told(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text("seed: 0\nfp16:\n  loss_scale: {growth_interval: 2000}\n")
    child = tmp_path / "fusion.yaml"
    child.write_text("model: {encoders: null}\n")
    assert any("FP16 is on" in said and "default.yaml:2" in said for said in _looked_at(tmp_path, child))
    child.write_text("model: {encoders: null}\nfp16: null\n")
    assert any("FP16 is off" in said and "fusion.yaml:2" in said for said in _looked_at(tmp_path, child))


def _looked_at(folder: Path, config: Path) -> list[str]:
    answer = ask_log("fp16-inactive", folder / "log", windows(5), config=str(config))
    assert found(answer) == {}
    return list(answer.looked_at)


def test_mmengine_ignores_a_top_level_fp16(tmp_path: Path) -> None:
    config = tmp_path / "a.py"
    config.write_text(
        "train_dataloader = dict(batch_size=4)\n"
        "optim_wrapper = dict(type='OptimWrapper')\n"
        "fp16 = dict(loss_scale=512.)\n"
    )
    finding = the(ask_log("fp16-inactive", tmp_path, windows(5), config=str(config)), "PREC101")
    assert (finding.severity.value, finding.title) == ("warn", "FP16 is asked for in a place that has no effect")


def test_a_run_that_was_not_started_with_this_config(tmp_path: Path) -> None:
    config = tmp_path / "a.py"
    config.write_text(FP16)
    answer = ask("fp16-inactive", _log(tmp_path / "a.log", FP32), config=str(config))
    assert "asks for FP16, and the run trained in FP32" in the(answer, "PREC101").title


@pytest.mark.parametrize("marked", [True, False])
def test_mmcv_converts_marked_methods_only(tmp_path: Path, marked: bool) -> None:
    code = tmp_path / "models"
    code.mkdir()
    mark = "    @auto_fp16()\n" if marked else ""
    (code / "depth.py").write_text(f"class Depther:\n{mark}    def forward(self, x):\n        return x\n")
    answer = ask("fp16-inactive", _log(tmp_path / "a.log", FP16), source=code)
    assert found(answer) == ({} if marked else {"PREC104": "warn"})


def test_parts_that_the_code_keeps_in_fp32_are_listed(tmp_path: Path) -> None:
    (tmp_path / "view.py").write_text(
        "@force_fp32()\ndef get_geometry(x):\n    return x\n\n\n"
        "def lift(x):\n    with autocast(enabled=False):\n        return x\n\n\n"
        "@auto_fp16()\ndef forward(x):\n    return x\n"
    )
    answer = ask("fp16-inactive", _log(tmp_path / "a.log", FP16), source=tmp_path)
    told = evidence(the(answer, "PREC103"))
    assert "view.py:1: force_fp32()" in told
    assert "view.py:7: autocast(enabled=False)" in told
    assert found(answer) == {}


def test_gradients_that_overflow_now_and_then_prove_that_a_scale_is_at_work(tmp_path: Path) -> None:
    lines = windows(100, {2: {"grad_norm": "nan"}, 60: {"grad_norm": "inf"}})
    answer = ask_log("fp16-inactive", tmp_path, [*header(FP16, "0"), *lines])
    assert (answer.status, found(answer)) == (Status.CLEAR, {})


@pytest.mark.parametrize(
    ("share", "expected", "status"),
    [
        (0.98, {}, Status.CLEAR),
        (0.8, {"PREC103": "warn"}, Status.FOUND),
        (0.02, {"PREC001": "fail"}, Status.FOUND),
        (None, {}, Status.INCONCLUSIVE),
    ],
)
def test_a_run_that_counts_its_matrix_products(
    tmp_path: Path, share: float | None, expected: dict[str, str], status: Status
) -> None:
    loss = {"loss": [2.0] * 200}
    event = {"kind": "precision", "message": "counted", "time": 1.79e9, "data": {"share": share, "loss_scale": 512.0}}
    answer = ask("fp16-inactive", own_run(tmp_path, loss, 200, [event] if share is not None else []))
    assert (found(answer), answer.status) == (expected, status)


def test_gradients_that_are_never_finite_prove_nothing(tmp_path: Path) -> None:
    answer = ask_log("fp16-inactive", tmp_path, [*header(FP16, "0"), *windows(40, grad_norm="nan")])
    assert answer.status is Status.INCONCLUSIVE


def test_what_cannot_be_told_is_inconclusive(tmp_path: Path) -> None:
    answer = ask_log("fp16-inactive", tmp_path, windows(30))
    assert (answer.status, list(answer.findings)) == (Status.INCONCLUSIVE, [])
    assert "--against" in answer.looked_at[-1]
