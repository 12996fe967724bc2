"""`diagnose nan` from log, config, checkpoints and source alone, on the troubles that people report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bevctl.diagnose.report import Status
from bevctl.errors import BevctlError
from tests.runs.logs import mmcv_message, write

from .cases import (
    ASSIGNER,
    CRASHING_FP16,
    ask,
    ask_log,
    evidence,
    found,
    header,
    mmcv_checkpoint,
    mmcv_config,
    scaler,
    the,
    windows,
)

NAN_NORM = {"grad_norm": "nan"}


@pytest.mark.parametrize(
    "changes", [{}, {4: NAN_NORM, 5: {"loss": "nan", "loss/object/loss_heatmap": "nan", **NAN_NORM}}]
)
def test_the_assigner_dies_late_of_nan_in_the_heads_outputs(tmp_path: Path, changes: dict[int, dict[str, str]]) -> None:
    answer = ask_log("nan", tmp_path, [*header(mmcv_config(1), "0,1"), *windows(5, changes), *ASSIGNER])
    finding = the(answer, "NAN005")
    assert answer.status is Status.FOUND
    assert finding.severity.value == "fail"
    assert "late sign of NaN in the outputs of the head" in finding.cause
    told = "\n".join(evidence(item) for item in answer.findings)
    last = 150 if changes else 250
    assert f"iteration {last} (epoch 1): last record " in told
    assert "lr 2e-05" in told
    assert any("first epoch in FP32" in remedy.why for remedy in finding.fix)
    if changes:
        assert "gradient norm not finite in 1 record before it" in told
    unscaled = the(answer, "LR002")
    assert "made for a batch of 32; this run has 2" in unscaled.title


def test_nan_norms_at_the_start_and_once_later_are_benign(tmp_path: Path) -> None:
    bad = dict.fromkeys((1, 2, 20), NAN_NORM)
    answer = ask_log("nan", tmp_path, [*header(mmcv_config(4, more=CRASHING_FP16), "0,1"), *windows(40, bad)])
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    assert "as loss scaling does" in the(answer, "NAN002").title
    advice = the(answer, "LR002")
    assert "linear for 8: 5e-05" in evidence(advice)
    assert "too small costs accuracy" in advice.cause


def test_nan_norms_throughout_with_a_flat_loss_are_no_step_at_all(tmp_path: Path) -> None:
    answer = ask_log("nan", tmp_path, [*header(mmcv_config(4), "0,1"), *windows(40, loss="9.0000", grad_norm="nan")])
    assert the(answer, "NAN004").severity.value == "fail"
    assert the(answer, "LR002").severity.value == "warn"


def test_of_two_tasks_the_one_that_went_first_is_named_with_the_checkpoint_before(tmp_path: Path) -> None:
    map_nan = {"loss/map/drivable_area/focal": "nan", "loss/map/divider/focal": "nan", "loss": "nan", **NAN_NORM}
    all_nan = {**map_nan, "loss/object/loss_heatmap": "nan", "loss/object/layer_-1_loss_bbox": "nan"}
    tasks = {"loss/map/drivable_area/focal": "0.0900", "loss/map/divider/focal": "0.2100"}
    lines = windows(43, {42: map_nan, 43: all_nan}, **tasks)
    lines.insert(40, mmcv_message(2000.5, "Saving checkpoint at 5 epochs"))
    answer = ask_log("nan", tmp_path, lines)
    told = evidence(the(answer, "NAN001"))
    assert "not finite first: map at iteration 2100, then object at iteration 2150" in told
    assert "last checkpoint before: Saving checkpoint at 5 epochs" in told
    assert "heatmap" not in the(answer, "NAN001").cause
    assert "it never recovers" in told
    assert "late, after 41 records" in told


def test_a_heatmap_loss_in_the_hundreds_at_the_start_is_a_note_only(tmp_path: Path) -> None:
    first = {"loss/object/loss_heatmap": "611.5000", "loss": "623.9000", **NAN_NORM}
    answer = ask_log("nan", tmp_path, windows(3, {1: first, 2: {"loss/object/loss_heatmap": "4.0000"}}))
    assert (answer.status, found(answer)) == (Status.CLEAR, {})


@pytest.mark.parametrize("told", [True, False])
def test_one_loss_of_six_that_is_nan_from_the_start_is_the_heatmap_in_half(tmp_path: Path, told: bool) -> None:
    heads = {
        "loss/object/loss_heatmap": "",
        "loss/object/layer_-1_loss_bbox": "",
        "task0.loss_xy": "0.2500",
        "task0.loss_yaw": "0.1500",
        "task0.loss_heatmap": "nan",
        "task1.loss_xy": "0.2600",
        "task1.loss_yaw": "0.1100",
        "task1.loss_heatmap": "1.9000",
    }
    top = header(mmcv_config(model="BEVDet", more=CRASHING_FP16), "0") if told else []
    answer = ask_log("nan", tmp_path, [*top, *windows(4, loss="nan", **NAN_NORM, **heads)])
    finding = the(answer, "NAN102")
    assert "1 of 6 not finite: task0.loss_heatmap" in evidence(finding)
    assert finding.confidence == (0.8 if told else 0.56)
    assert ("not told by log or config" in evidence(finding)) == (not told)


def test_fp32_takes_the_blame_off_half_precision(tmp_path: Path) -> None:
    lines = [*header(mmcv_config(more="fp16 = None\n"), "0"), *windows(4, loss="nan", **{"task.loss_heatmap": "nan"})]
    assert "NAN102" not in found(ask_log("nan", tmp_path, lines))


STATIC = (
    "optimizer_config = dict(type='Fp16OptimizerHook', loss_scale=512., grad_clip=dict(max_norm=35, norm_type=2))\n"
)


def test_a_fixed_scale_that_overflows_in_most_windows_cannot_adapt(tmp_path: Path) -> None:
    bad = {number: {"grad_norm": "inf"} for number in range(1, 101) if number % 5 < 3}
    lines = [*header(mmcv_config(model="Petr3D", batch=1, more=STATIC), "0,1,2,3,4,5,6,7"), *windows(100, bad)]
    answer = ask_log("nan", tmp_path, lines)
    finding = the(answer, "NAN101")
    assert finding.severity.value == "warn"
    assert "fixed at 512" in evidence(finding)
    assert "not finite in 60 of 100 records (60%)" in evidence(finding)
    assert "dynamic" in finding.fix[0].why
    assert "LR002" not in [f.id for f in answer.findings]


def test_a_dynamic_scale_with_two_infinite_windows_is_clear(tmp_path: Path) -> None:
    bad = {number: {"grad_norm": "inf"} for number in (40, 80)}
    dynamic = STATIC.replace("512.", "'dynamic'")
    answer = ask_log("nan", tmp_path, [*header(mmcv_config(more=dynamic)), *windows(100, bad)])
    assert (answer.status, found(answer)) == (Status.CLEAR, {})


@pytest.mark.parametrize(("gpus", "batch"), [("0", 1), ("0,1,2,3", 4)])
def test_a_rate_for_eight_on_fewer_with_overflow_that_rises(tmp_path: Path, gpus: str, batch: int) -> None:
    bad = {number: {"grad_norm": "inf"} for number in range(60, 121) if number % 10}
    lines = [*header(mmcv_config(1, 2e-4, "Petr3D"), gpus), *windows(120, bad, loss="8.7000")]
    answer = ask_log("nan", tmp_path, lines)
    assert the(answer, "NAN003").severity.value == "fail"
    finding = the(answer, "LR002")
    assert f"this run has {batch}" in finding.title
    assert any(f"{max(8 // batch, 1)} batches for one optimizer step" in remedy.why for remedy in finding.fix)


def test_batches_that_are_added_up_count(tmp_path: Path) -> None:
    more = "optimizer_config = dict(type='GradientCumulativeFp16OptimizerHook', cumulative_iters=8)\n"
    lines = [*header(mmcv_config(1, 2e-4, "Petr3D", more), "0"), *windows(12)]
    assert [f.id for f in ask_log("nan", tmp_path, lines).findings if f.id == "LR002"] == []


@pytest.mark.parametrize(("gpu", "offered"), [("NVIDIA A100-SXM4-40GB", True), ("Tesla V100-SXM2-32GB", False)])
def test_bf16_is_offered_to_cards_that_have_it(tmp_path: Path, gpu: str, offered: bool) -> None:
    lines = [*header(mmcv_config(more=CRASHING_FP16), "0", gpu), *windows(20, loss="nan")]
    remedies = the(ask_log("nan", tmp_path, lines), "NAN001").fix
    assert any(remedy.why.startswith("BF16") for remedy in remedies) == offered


def test_an_auxiliary_head_and_a_run_whose_length_is_for_other_gpus(tmp_path: Path) -> None:
    more = "num_gpus = 8\nbatch_size = 2\n"
    heads = {
        "loss/object/loss_heatmap": "",
        "loss/object/layer_-1_loss_bbox": "",
        "frame_0_loss_cls": "1.1000",
        "frame_0_enc_loss_cls": "nan",
        "frame_0_centers2d_losses": "nan",
    }
    lines = [*header(mmcv_config(2, 4e-4, "Petr3D", more), "0,1,2,3"), *windows(3, loss="nan", **NAN_NORM, **heads)]
    answer = ask_log("nan", tmp_path, lines)
    assert "not finite: frame_0_enc_loss_cls, frame_0_centers2d_losses" in evidence(the(answer, "NAN103"))
    assert "num_gpus = 8" in evidence(the(answer, "NAN104"))
    assert "the run has 4 GPUs" in evidence(the(answer, "NAN104"))


def test_the_file_of_a_config_replaces_what_the_log_holds(tmp_path: Path) -> None:
    config = tmp_path / "petr.py"
    config.write_text(mmcv_config(1, 2e-4, "Petr3D", "auto_scale_lr = dict(base_batch_size=32)\n"))
    answer = ask_log("nan", tmp_path, [*header("", "0"), *windows(20, loss="9.0", **NAN_NORM)], config=str(config))
    assert "auto_scale_lr.base_batch_size" in evidence(the(answer, "LR002"))


@pytest.mark.parametrize(
    ("model", "id", "text"),
    [
        ("model = dict(type='Petr3D', head=dict(attn=dict(type='PETRMultiheadFlashAttention')))", "NAN105", "Flash"),
        ("model = dict(type='X', norm=dict(type='BN', eps=1e-8))", "NAN106", "eps = 1e-08 is 0 in FP16"),
        ("model = dict(type='MVXFasterRCNN', img_neck=dict(type='FPN', num_outs=5))", "NAN107", "without norm_cfg"),
    ],
)
def test_parts_of_the_config_that_are_first_suspects(tmp_path: Path, model: str, id: str, text: str) -> None:
    config = f"{model}\ndata = dict(samples_per_gpu=1)\n{CRASHING_FP16}"
    troubled = ask_log("nan", tmp_path, [*header(config), *windows(20, loss="9.0", **NAN_NORM)])
    assert text in evidence(the(troubled, id))
    healthy = ask_log("nan", tmp_path / "healthy", [*header(config), *windows(20)])
    assert (healthy.status, found(healthy)) == (Status.CLEAR, {})


def test_every_record_without_a_finite_gradient_means_that_no_step_was_taken(tmp_path: Path) -> None:
    answer = ask_log("nan", tmp_path, windows(30, loss="5.0000", **NAN_NORM))
    assert "No step was taken" in the(answer, "NAN004").title


def test_identical_layers_with_nan_gradients_and_code_that_replaces_nan(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "petr_head.py").write_text(
        "import torch\n\n\ndef inverse_sigmoid(x, eps=1e-5):\n"
        "    return torch.log(x.clamp(min=eps) / (1 - x).clamp(min=eps))\n\n\n"
        "class Head:\n    def forward(self, out):\n        return torch.nan_to_num(out)\n"
    )
    layers = {f"d{layer}.loss_cls": "1.4321" for layer in range(5)}
    names = {"loss/object/loss_heatmap": "", "loss/object/layer_-1_loss_bbox": "", "loss_cls": "1.4321", **layers}
    lines = windows(12, loss="8.5926", **NAN_NORM, **names)
    answer = ask_log("nan", tmp_path, lines, source=tmp_path / "models")
    assert "6 loss parts have the same value 1.4321" in evidence(the(answer, "NAN004"))
    assert "petr_head.py:10: torch.nan_to_num(out)" in evidence(the(answer, "NAN108"))
    assert "petr_head.py:4: def inverse_sigmoid" in evidence(the(answer, "NAN112"))
    healthy = ask_log("nan", tmp_path / "healthy", windows(12), source=tmp_path / "models")
    assert (healthy.status, found(healthy)) == (Status.CLEAR, {})


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("", "no force_fp32 and no autocast"),
        ("@force_fp32()\ndef loss(p):\n    return p\n", "depth_lss.py:1: the view"),
    ],
)
def test_code_that_leaves_losses_or_geometry_in_fp16(tmp_path: Path, head: str, told: str) -> None:
    (tmp_path / "depth_lss.py").write_text("@auto_fp16()\ndef get_cam_feats(x):\n    return x\n")
    (tmp_path / "head.py").write_text(head or "x = 1\n")
    top = header(mmcv_config(more=CRASHING_FP16))
    answer = ask_log("nan", tmp_path / "log", [*top, *windows(12, loss="nan")], source=tmp_path)
    assert told in evidence(the(answer, "NAN113"))
    assert found(ask_log("nan", tmp_path / "healthy", [*top, *windows(12)], source=tmp_path)) == {}


def _scalars(path: Path, bad: range) -> Path:
    rows = []
    for number in range(1, 41):
        nan = number in bad
        rows.append(
            f'{{"lr": 0.0003, "loss": {"NaN" if nan else 3 / number + 1}, "loss_cls": 1.2{number % 7}, '
            f'"loss_bbox": {"NaN" if nan else 0.5 + number / 100}, "time": 0.4, "data_time": 0.01, '
            f'"epoch": {1 + number // 25}, "iter": {50 * number}, "memory": 3900, "step": {50 * number}}}'
        )
    return write(path / "vis_data" / "scalars.json", rows)


def test_a_nan_loss_that_recovers_and_one_that_stays(tmp_path: Path) -> None:
    isolated = ask("nan", _scalars(tmp_path / "a", range(25, 26)))
    assert the(isolated, "NAN001").severity.value == "warn"
    assert "1 record in a row, then finite again" in evidence(the(isolated, "NAN001"))
    lasting = ask("nan", _scalars(tmp_path / "b", range(25, 41)))
    assert the(lasting, "NAN001").severity.value == "fail"
    assert "it never recovers (16 records to the end)" in evidence(the(lasting, "NAN001"))
    assert "only running the step again" in lasting.looked_at[-1]


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        ("RuntimeError: Function 'DivBackward0' returned nan values in its 0th output.", "anomaly mode"),
        ("  85%|████ | 850/1000 [01:10<00:12, 12.0it/s, loss=nan]", "progress bar"),
        (
            "torch/nn/utils/clip_grad.py:28: FutureWarning: Non-finite norm encountered in "
            "torch.nn.utils.clip_grad_norm_; continuing anyway.",
            "Clipping met gradients",
        ),
        ("AssertionError: loss become infinite or NaN!", "A check of the training code"),
        ("Exception: Current loss scale already at minimum - cannot decrease scale anymore.", "cannot go lower"),
        ("ValueError: Attempting to unscale FP16 gradients.", "weights themselves are FP16"),
    ],
)
def test_lines_of_the_log_that_name_the_trouble(tmp_path: Path, line: str, meaning: str) -> None:
    answer = ask_log("nan", tmp_path, [*windows(5), line])
    finding = the(answer, "NAN115")
    assert (finding.severity.value, answer.status) == ("warn", Status.FOUND)
    assert meaning in finding.cause
    assert finding.evidence[0].where.endswith(".log:6")


@pytest.mark.parametrize(("drops", "expected"), [(10, {}), (20, {"SCALE002": "fail"})])
def test_a_loss_scale_that_apex_halves(tmp_path: Path, drops: int, expected: dict[str, str]) -> None:
    said = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to"
    answer = ask_log("nan", tmp_path, [f"{said} {2.0 ** (16 - n)}" for n in range(1, drops + 1)])
    assert found(answer) == expected


def test_a_scheduler_that_steps_first_is_harmless(tmp_path: Path) -> None:
    line = "UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`. In PyTorch 1.1.0 and later"
    answer = ask_log("nan", tmp_path, [line, *windows(12)])
    assert (answer.status, found(answer)) == (Status.CLEAR, {})
    assert "Harmless" in the(answer, "NAN115").cause


@pytest.mark.parametrize(
    ("scale", "severity", "status"),
    [
        (65536.0, None, Status.CLEAR),
        (128.0, None, Status.CLEAR),
        (1.0, "warn", Status.FOUND),
        (0.0, "fail", Status.FOUND),
        (3.1e-23, "fail", Status.FOUND),
        (float("inf"), "fail", Status.FOUND),
        (float("nan"), "fail", Status.FOUND),
        (1000.0, "info", Status.CLEAR),
    ],
)
@pytest.mark.parametrize("project", ["mmcv", "mmengine"])
def test_the_loss_scale_in_a_checkpoint(
    tmp_path: Path, scale: float, severity: str | None, status: Status, project: str
) -> None:
    path = mmcv_checkpoint(tmp_path / "epoch_1.pth", scale)
    if project == "mmengine":
        state = {"loss_scaler": scaler(scale), "state": {}, "param_groups": []}
        weights = {"backbone.conv.weight": torch.ones(2, 2)}
        content = {"state_dict": weights, "optimizer": state, "message_hub": {}, "meta": {"epoch": 1, "iter": 400}}
        torch.save(content, path)
    answer = ask("nan", None, checkpoint=path)
    assert [finding.severity.value for finding in answer.findings if finding.id == "FILE008"] == (
        [severity] if severity else []
    )
    assert answer.status is status


NAN_TENSOR = torch.tensor([1.0, float("nan"), 3.0, float("inf")])


@pytest.mark.parametrize(
    ("spoiled", "id", "told"),
    [
        ({"backbone.bn.running_var": NAN_TENSOR}, "FILE005", "BatchNorm statistics: 1 tensors"),
        ({"backbone.bn.running_var": torch.tensor([1.0, -0.5])}, "NAN110", "holds values below 0"),
        ({"head.weight": NAN_TENSOR}, "FILE005", "weights: 1 tensors"),
    ],
)
def test_the_last_clean_checkpoint_of_a_run(
    tmp_path: Path, spoiled: dict[str, torch.Tensor], id: str, told: str
) -> None:
    write(tmp_path / "20260203_040506.log", windows(40, {40: NAN_NORM}))
    for epoch in (1, 2, 3, 9, 10):
        mmcv_checkpoint(tmp_path / f"epoch_{epoch}.pth", 512.0, epoch, **(spoiled if epoch > 3 else {}))
    answer = ask("nan", tmp_path)
    finding = the(answer, id)
    assert finding.title.startswith("epoch_9.pth: ")
    assert told in evidence(finding)
    assert f"spoiled: epoch_9.pth, epoch_10.pth; last clean one: {tmp_path / 'epoch_3.pth'}" in evidence(finding)
    assert "epoch_3.pth" in finding.fix[0].why


def test_moments_and_averages_are_looked_at_too(tmp_path: Path) -> None:
    path = mmcv_checkpoint(tmp_path / "epoch_2.pth")
    content = torch.load(path, weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"][0, 0] = float("nan")
    content["ema_state_dict"] = {"conv.weight": NAN_TENSOR}
    torch.save(content, path)
    told = evidence(the(ask("nan", None, checkpoint=path), "FILE005"))
    assert "optimizer moments: 1 tensors" in told
    assert "averaged weights: 1 tensors" in told


@pytest.mark.parametrize("scale", [None, 512.0])
def test_a_checkpoint_of_an_fp16_run_without_its_loss_scale(tmp_path: Path, scale: float | None) -> None:
    config = tmp_path / "a.py"
    config.write_text(mmcv_config(more=CRASHING_FP16))
    answer = ask("nan", None, checkpoint=mmcv_checkpoint(tmp_path / "epoch_2.pth", scale), config=str(config))
    assert answer.status is Status.CLEAR
    assert ("fresh one" in answer.looked_at[-1]) == (scale is None)


def test_weights_that_fp16_cannot_hold_matter_in_fp16(tmp_path: Path) -> None:
    path = mmcv_checkpoint(tmp_path / "epoch_2.pth", **{"head.weight": torch.tensor([7e4, 1.0])})
    config = tmp_path / "a.py"
    for text, expected in ((CRASHING_FP16, {"NAN111": "fail"}), ("fp16 = None\n", {})):
        config.write_text(mmcv_config(more=text))
        assert found(ask("nan", None, checkpoint=path, config=str(config))) == expected


def test_what_shows_nothing_is_inconclusive(tmp_path: Path) -> None:
    assert ask_log("nan", tmp_path, header(mmcv_config(), "0")).status is Status.INCONCLUSIVE
    config = tmp_path / "a.py"
    config.write_text(mmcv_config(more=STATIC))
    answer = ask("nan", None, config=str(config))
    assert answer.status is Status.INCONCLUSIVE
    assert the(answer, "NAN101").severity.value == "info"
    broken = tmp_path / "epoch_1.pth"
    broken.write_bytes(b"PK\x03\x04 cut off")
    write(tmp_path / "a.log", windows(3))
    assert any("was not read" in said for said in ask("nan", tmp_path).looked_at)
    with pytest.raises(BevctlError, match="truncated"):
        ask("nan", None, checkpoint=broken)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="does not exist"):
        ask_log("nan", tmp_path, windows(3), source=tmp_path / "nowhere")
    with pytest.raises(BevctlError, match="cannot be read"):
        ask("nan", tmp_path / "nowhere.log")
    with pytest.raises(BevctlError, match="Nothing to look at"):
        ask("nan", None)
