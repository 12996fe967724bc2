"""What is asked for, as changes of each kind of config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bevctl.config import foreign_facts
from bevctl.config.foreign import changed, read_foreign
from bevctl.errors import BevctlError
from bevctl.external.overrides import literal, read_overrides
from bevctl.external.precision import precision_changes
from bevctl.external.trees import read_tree
from bevctl.external.wanted import Wanted, changes_of

from . import trees

BLOCK, HOOK = "fp16 = dict(loss_scale=512.)\n", "optimizer_config = dict(type='Fp16OptimizerHook', loss_scale=512.)\n"
CUMULATIVE = "optimizer_config = dict(type='GradientCumulativeOptimizerHook', cumulative_iters=4)\n"
AMP = "optim_wrapper = dict(type='AmpOptimWrapper', dtype='float16', loss_scale=128., optimizer=dict(lr=0.1))\n"


def changes(tmp_path: Path, kind: str, text: str, asked: str | None, scale: Any = None) -> Any:
    """The changes of a config with more text, after which it has what was asked for."""
    path = trees.KINDS[kind](tmp_path)
    path.write_text(path.read_text() + text)
    config = read_foreign(path)
    found = precision_changes(config, read_tree(tmp_path), asked, scale)
    after = foreign_facts.half_precision(changed(config, found))
    assert asked is None or (after.dtype if after.on else "fp32") == asked
    assert scale is None or after.loss_scale == scale
    return dict(found)


@pytest.mark.parametrize(
    ("kind", "text", "asked", "scale", "expected"),
    [
        ("mmdet3d-0.x", "", None, None, {}),
        ("mmdet3d-0.x", "", "fp16", None, {"fp16.loss_scale": "dynamic"}),
        ("mmdet3d-0.x", "", "fp16", 512.0, {"fp16.loss_scale": 512.0}),
        ("mmdet3d-0.x", BLOCK, "fp16", None, {}),
        ("mmdet3d-0.x", BLOCK, None, "dynamic", {"fp16.loss_scale": "dynamic"}),
        ("mmdet3d-0.x", BLOCK, "fp32", None, {"fp16": None}),
        ("mmdet3d-0.x", HOOK, "fp16", "dynamic", {"optimizer_config.loss_scale": "dynamic"}),
        ("mmdet3d-0.x", HOOK, "fp32", None,
         {"optimizer_config": {"_delete_": True, "grad_clip": {"max_norm": 35, "norm_type": 2}}}),
        ("mmdet3d-0.x", CUMULATIVE, "fp16", None,
         {"optimizer_config.type": "GradientCumulativeFp16OptimizerHook", "optimizer_config.loss_scale": "dynamic"}),
        ("petr", "optimizer_config = dict(grad_clip=None)\n", "fp16", None,
         {"optimizer_config.type": "Fp16OptimizerHook", "optimizer_config.loss_scale": "dynamic"}),
        ("petr", "", "fp32", None, {"optimizer_config": {"_delete_": True, "grad_clip": {"max_norm": 35}}}),
        ("mit-bevfusion", "", "fp16", None, {}),
        ("mit-bevfusion", "", "fp16", 512.0, {"fp16.loss_scale": 512.0}),
        ("mit-bevfusion", "", "fp32", None, {"fp16": None}),
        ("mit-bevfusion", "fp16: null\n", "fp16", None, {"fp16.loss_scale.growth_interval": 2000}),
        ("mmdet3d-1.x", "", "fp16", None,
         {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.loss_scale": "dynamic"}),
        ("mmdet3d-1.x", "", "bf16", None,
         {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.loss_scale": "dynamic",
          "optim_wrapper.dtype": "bfloat16"}),
        ("mmdet3d-1.x", AMP, "fp16", None, {}),
        ("mmdet3d-1.x", AMP, "fp16", "dynamic", {"optim_wrapper.loss_scale": "dynamic"}),
        ("mmdet3d-1.x", AMP, "fp32", None,
         {"optim_wrapper": {"_delete_": True, "type": "OptimWrapper", "optimizer": {"lr": 0.1}}}),
        ("mmdet3d-1.x", AMP.replace("float16", "bfloat16"), "fp16", None,
         {"optim_wrapper.type": "AmpOptimWrapper", "optim_wrapper.loss_scale": "dynamic",
          "optim_wrapper.dtype": "float16"}),
        ("openpcdet", "", "fp16", None, {"OPTIMIZATION.USE_AMP": True}),
        ("openpcdet", "", "fp32", None, {}),
    ],
)  # fmt: skip
def test_precision(tmp_path: Path, kind: str, text: str, asked: str, scale: Any, expected: Any) -> None:
    assert changes(tmp_path, kind, text, asked, scale) == expected


@pytest.mark.parametrize(
    ("kind", "text", "asked", "scale", "said"),
    [
        ("mmdet3d-0.x", "", "bf16", None, "has no BF16"),
        ("mmdet3d-0.x", "", None, 512.0, "A loss scale belongs to FP16"),
        ("mmdet3d-0.x", "optimizer_config = dict(type='MyHook')\n", "fp16", None, "is MyHook, and how it does FP16"),
        ("mmdet3d-0.x", "import os\nfp16 = os.environ['X']\n", "fp16", None, "cannot be worked out"),
        ("petr", "import x\noptimizer_config['grad_clip'] = x.y\n", "fp32", None, "optimizer_config cannot be worked"),
        ("mmdet3d-1.x", "", "bf16", 512.0, "BF16 needs no loss scale"),
        ("mmdet3d-1.x", "optim_wrapper = dict(type='ApexOptimWrapper')\n", "fp16", None, "is ApexOptimWrapper"),
        ("openpcdet", "", "fp16", 512.0, "always dynamic"),
    ],
)
def test_precision_that_cannot_be_had(
    tmp_path: Path, kind: str, text: str, asked: str | None, scale: Any, said: str
) -> None:
    with pytest.raises(BevctlError, match=said):
        changes(tmp_path, kind, text, asked, scale)


def test_an_openpcdet_without_mixed_precision(tmp_path: Path) -> None:
    config = trees.openpcdet(tmp_path)
    script = tmp_path / "tools" / "train.py"
    script.write_text(script.read_text().replace("parser.add_argument('--use_amp', action='store_true')\n", ""))
    with pytest.raises(BevctlError, match="does not know --use_amp"):
        precision_changes(read_foreign(config), read_tree(tmp_path), "fp16", None)


def asked(tmp_path: Path, kind: str, text: str = "", **wanted: Any) -> tuple[dict[str, Any], list[str]]:
    path = trees.KINDS[kind](tmp_path)
    path.write_text(path.read_text() + text)
    return changes_of(read_foreign(path), read_tree(tmp_path), Wanted(**wanted))


@pytest.mark.parametrize(
    ("kind", "gpus", "batch", "rule", "lr"),
    [
        ("mmdet3d-0.x", 4, 4, "linear", 5e-5),  # 4 a GPU on 8 GPUs is what the config was made for
        ("mmdet3d-0.x", 2, 4, "sqrt", 5e-5),
        ("petr", 8, 4, "linear", 8e-4),
        ("mmdet3d-1.x", 1, 4, "linear", 1.25e-5),
        ("openpcdet", 8, 8, "linear", 2e-3),
        ("mit-bevfusion", 8, 2, "sqrt", 1.41421e-4),
    ],
)
def test_rate_by_rule(tmp_path: Path, kind: str, gpus: int, batch: int, rule: str, lr: float) -> None:
    found, notes = asked(tmp_path, kind, gpus=gpus, batch=batch, lr_scaling=rule)
    rates = [value for key, value in found.items() if key.lower().endswith(".lr")]
    assert rates == [pytest.approx(lr)]
    assert f"{rule} rule" in notes[0]


def test_a_rate_that_stays_is_told(tmp_path: Path) -> None:
    found, notes = asked(tmp_path, "mmdet3d-0.x", gpus=2)
    assert found == {}
    assert notes == [
        "lr stays 0.0001, made for a global batch of 32; this run has 8: --lr-scaling linear gives 2.5e-05, sqrt 5e-05"
    ]
    assert asked(tmp_path, "mmdet3d-0.x", gpus=8)[1] == []


def test_least_rates_follow_the_rate(tmp_path: Path) -> None:
    text = "lr_config = dict(policy='CosineAnnealing', min_lr=1e-6)\n"
    assert asked(tmp_path / "a", "mmdet3d-0.x", text, lr=2e-4)[0]["lr_config.min_lr"] == pytest.approx(2e-6)
    steps = asked(tmp_path / "b", "mmdet3d-1.x", lr=2e-4)[0]["param_scheduler"]
    assert [step["eta_min"] for step in steps] == [pytest.approx(2e-3), pytest.approx(0.85 / 0.95)]
    with pytest.raises(BevctlError, match="param_scheduler cannot be worked out"):
        asked(tmp_path / "c", "mmdet3d-1.x", "import x\nparam_scheduler[1]['begin'] = x.y\n", lr=2e-4)


def test_what_the_config_has_already_is_no_change(tmp_path: Path) -> None:
    assert asked(tmp_path, "mmdet3d-0.x", gpus=8, batch=4, workers=4, epochs=20, lr=1e-4, clip=35.0)[0] == {}


def test_every_place_of_a_value_is_set(tmp_path: Path) -> None:
    text = "data = dict(imgs_per_gpu=2, train_dataloader=dict(samples_per_gpu=3))\ntotal_epochs = 20\n"
    found, _ = asked(tmp_path, "mmdet3d-0.x", text, gpus=8, batch=5, epochs=7)
    assert found == {
        "data.train_dataloader.samples_per_gpu": 5,
        "data.imgs_per_gpu": 5,
        "data.samples_per_gpu": 5,
        "runner.max_epochs": 7,
        "total_epochs": 7,
    }


@pytest.mark.parametrize(
    ("kind", "wanted", "said"),
    [
        ("mmdet3d-0.x", {"warmup": 500}, "the config has no warm-up"),
        ("mmdet3d-1.x", {"warmup": 500}, "--warmup has no place in a config of kind mmengine"),
        ("mmdet3d-0.x", {"accumulate": 2}, "--accumulate has no place"),
        ("openpcdet", {"seed": 1}, "--seed has no place"),
        ("openpcdet", {"deterministic": True}, "--deterministic has no place"),
        ("petr", {"batch": -1}, "--batch -1 is below 1"),
        ("petr", {"lr": float("nan")}, "--lr nan is below 0"),
        ("petr", {"epochs": 0}, "--epochs 0 is below 1"),
    ],
)
def test_what_a_project_has_no_place_for(tmp_path: Path, kind: str, wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(BevctlError, match=said):
        asked(tmp_path, kind, **wanted)


def test_a_config_that_counts_iterations_has_no_epochs(tmp_path: Path) -> None:
    with pytest.raises(BevctlError, match="counts iterations, not epochs"):
        asked(tmp_path, "petr", "runner = dict(type='IterBasedRunner', max_iters=80000)\n", epochs=3)


def test_overrides(tmp_path: Path) -> None:
    file = tmp_path / "more.yaml"
    file.write_text("model: {a: {b: 1}, c: [1, 2]}\nfp16: null\n")
    assert read_overrides(["x.y=2e-4", "name=pillar", str(file), "on=true", "path=a=b"]) == (
        ("x.y", 2e-4),
        ("name", "pillar"),
        ("model.a.b", 1),
        ("model.c", [1, 2]),
        ("fp16", None),
        ("on", True),
        ("path", "a=b"),
    )
    file.write_text("a: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(BevctlError, match="more than plain values"):
        read_overrides([str(file)])
    with pytest.raises(BevctlError, match="Cannot read config"):
        read_overrides([str(tmp_path / "absent.yaml")])
    assert literal("__import__('os')") == "__import__('os')"
