"""What configs of other projects ask for: precision above all, and by which file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.config import foreign_facts as facts
from bevctl.config.foreign import ForeignConfig, changed, read_foreign
from bevctl.errors import BevctlError


def python(tmp_path: Path, text: str) -> ForeignConfig:
    path = tmp_path / "config_8xb4-cyclic.py"
    path.write_text(text)
    return read_foreign(path)


MMCV = "data = dict(samples_per_gpu=2, workers_per_gpu=3)\n"
IMPORTS = "from mmengine.optim import AmpOptimWrapper, OptimWrapper\n"
MMENGINE = "train_dataloader = dict(batch_size=4, num_workers=5)\n"


@pytest.mark.parametrize(
    ("text", "on", "scale", "dtype"),
    [
        (MMCV + "fp16 = dict(loss_scale=512.)", True, 512.0, "fp16"),
        (MMCV + "fp16 = dict(loss_scale='dynamic')", True, "dynamic", "fp16"),
        (MMCV + "fp16 = dict(loss_scale=dict(init_scale=512))", True, "dynamic", "fp16"),
        (MMCV + "fp16 = dict()", True, 512.0, "fp16"),
        (MMCV + "fp16 = None", False, None, "fp16"),
        (MMCV, False, None, "fp16"),
        (MMCV + "optimizer_config = dict(type='Fp16OptimizerHook', loss_scale=128.)", True, 128.0, "fp16"),
        (MMCV + "optimizer_config = dict(type='GradientCumulativeFp16OptimizerHook')", True, 512.0, "fp16"),
        (MMCV + "optimizer_config = dict(grad_clip=dict(max_norm=35))", False, None, "fp16"),
        (MMCV + "import os\nfp16 = os.environ['X']", None, None, "fp16"),
        (MMENGINE + "optim_wrapper = dict(type='AmpOptimWrapper')", True, "dynamic", "fp16"),
        (MMENGINE + "optim_wrapper = dict(type='AmpOptimWrapper', loss_scale=256.)", True, 256.0, "fp16"),
        (MMENGINE + "optim_wrapper = dict(type='AmpOptimWrapper', dtype='bfloat16')", True, "dynamic", "bf16"),
        (MMENGINE + "optim_wrapper = dict(type='OptimWrapper')", False, None, "fp16"),
        (MMENGINE + "fp16 = dict(loss_scale=512.)", False, None, "fp16"),
        (IMPORTS + MMENGINE + "optim_wrapper = dict(type=AmpOptimWrapper)", True, "dynamic", "fp16"),
        (IMPORTS + MMENGINE + "optim_wrapper = dict(type=OptimWrapper)", False, None, "fp16"),
    ],
)  # fmt: skip
def test_half_precision(tmp_path: Path, text: str, on: bool | None, scale: object, dtype: str) -> None:
    found = facts.half_precision(python(tmp_path, text))
    assert (found.on, found.loss_scale, found.dtype) == (on, scale, dtype)
    assert found.origin is None or str(found.origin).endswith(f".py:{text.count(chr(10)) + 1}")


def test_half_precision_inherited_from_a_default_yaml(tmp_path: Path) -> None:
    (tmp_path / "default.yaml").write_text("seed: 0\nfp16:\n  loss_scale: {growth_interval: 2000}\n")
    child = tmp_path / "det" / "fusion.yaml"
    child.parent.mkdir()
    child.write_text("model: {encoders: null}\n")
    found = facts.half_precision(read_foreign(child))
    assert found.on is True
    assert str(found.origin).endswith("default.yaml:2")
    child.write_text("model: {encoders: null}\nfp16: null\n")
    assert facts.half_precision(read_foreign(child)).on is False


def test_numbers_of_mmcv(tmp_path: Path) -> None:
    text = (
        "data = dict(samples_per_gpu=2, workers_per_gpu=3, train=dict(type='CBGSDataset', dataset=dict(\n"
        "    ann_file='d/train.pkl', data_root='d/')), val=dict(ann_file='d/val.pkl'))\n"
        "optimizer = dict(lr=2e-4)\nrunner = dict(max_epochs=24)\nclass_names = ['car', 'bus']\n"
        "load_from = 'a.pth'\nresume_from = None\n"
        "model = dict(img_backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='b.pth')), pretrained=None)\n"
    )
    config = python(tmp_path, text)
    assert (facts.batch_per_gpu(config), facts.workers_per_gpu(config), facts.epochs(config)) == (2, 3, 24)
    assert facts.learning_rate(config) == 2e-4
    assert facts.info_files(config) == {"train": Path("d/train.pkl"), "val": Path("d/val.pkl")}
    assert facts.data_root(config) == Path("d")
    assert facts.class_names(config) == ("car", "bus")
    assert {key: name for key, (name, _) in facts.checkpoints(config).items()} == {
        "load_from": "a.pth",
        "model.img_backbone.init_cfg.checkpoint": "b.pth",
    }


def test_numbers_of_mmengine(tmp_path: Path) -> None:
    text = (
        "train_dataloader = dict(batch_size=4, num_workers=5, dataset=dict(type='CBGSDataset', dataset=dict(\n"
        "    ann_file='train.pkl', data_root='d/')))\n"
        "val_dataloader = dict(dataset=dict(ann_file='val.pkl', data_root='d/'))\n"
        "optim_wrapper = dict(optimizer=dict(lr=1e-4))\ntrain_cfg = dict(max_epochs=6)\n"
        "auto_scale_lr = dict(base_batch_size=32)\nmetainfo = dict(classes=['car'])\n"
    )
    config = python(tmp_path, text)
    assert (facts.batch_per_gpu(config), facts.workers_per_gpu(config), facts.epochs(config)) == (4, 5, 6)
    assert (facts.learning_rate(config), facts.base_batch(config)) == (1e-4, 32)
    assert facts.info_files(config) == {"train": Path("d/train.pkl"), "val": Path("d/val.pkl")}
    assert facts.class_names(config) == ("car",)
    assert not facts.has_map_head(config)


def test_the_map_head_of_mit_bevfusion(tmp_path: Path) -> None:
    path = tmp_path / "seg.yaml"
    path.write_text("model: {encoders: null, heads: {object: null, map: {type: BEVSegmentationHead}}}\n")
    assert facts.has_map_head(read_foreign(path))


def test_openpcdet(tmp_path: Path) -> None:
    """A mapping starts from the file that it names; the path counts from tools/."""
    data = tmp_path / "tools" / "cfgs" / "dataset_configs" / "nuscenes_dataset.yaml"
    model = tmp_path / "tools" / "cfgs" / "nuscenes_models" / "pillar.yaml"
    for path in (data, model):
        path.parent.mkdir(parents=True)
    data.write_text("DATASET: 'NuScenesDataset'\nDATA_PATH: '../data/nuscenes'\nMAX_SWEEPS: 10\n")
    model.write_text(
        "CLASS_NAMES: ['car', 'bus']\n"
        "DATA_CONFIG:\n  _BASE_CONFIG_: cfgs/dataset_configs/nuscenes_dataset.yaml\n  MAX_SWEEPS: 1\n"
        "MODEL: {NAME: PointPillar, DENSE_HEAD: {NAME: AnchorHeadMulti}, ROI_HEAD: null}\n"
        "OPTIMIZATION: {BATCH_SIZE_PER_GPU: 4, NUM_EPOCHS: 20, LR: 0.001, OPTIMIZER: adam_onecycle}\n"
    )
    config = read_foreign(model)
    assert config.kind == "openpcdet"
    assert config.files == (data, model)
    assert (config.get("DATA_CONFIG.MAX_SWEEPS"), config.get("DATA_CONFIG.DATASET")) == (1, "NuScenesDataset")
    assert "_BASE_CONFIG_" not in config.get("DATA_CONFIG")
    assert (facts.batch_per_gpu(config), facts.workers_per_gpu(config), facts.epochs(config)) == (4, None, 20)
    assert (facts.learning_rate(config), facts.schedule(config)) == (0.001, "adam_onecycle")
    assert facts.class_names(config) == ("car", "bus")
    assert facts.data_root(config) == Path("../data/nuscenes")
    assert facts.heads(config) == {"DENSE_HEAD": "AnchorHeadMulti"}
    assert facts.half_precision(config).on is False
    half = facts.half_precision(changed(config, {"OPTIMIZATION.USE_AMP": True}))
    assert (half.on, half.loss_scale) == (True, "dynamic")
    data.unlink()
    with pytest.raises(BevctlError, match="the base cfgs"):
        read_foreign(model)


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        (MMCV + "lr_config = dict(policy='CosineAnnealing', warmup='linear', warmup_iters=500)",
         "CosineAnnealing, linear warm-up of 500 iterations"),
        (MMCV, ""),
        (MMENGINE + "param_scheduler = [dict(type='LinearLR'), dict(type='CosineAnnealingLR'),\n"
         "    dict(type='CosineAnnealingMomentum')]", "LinearLR, CosineAnnealingLR"),
        ("from mmengine.optim import LinearLR\n" + MMENGINE + "param_scheduler = dict(type=LinearLR)", "LinearLR"),
    ],
)  # fmt: skip
def test_schedule(tmp_path: Path, text: str, schedule: str) -> None:
    assert facts.schedule(python(tmp_path, text)) == schedule


def test_heads(tmp_path: Path) -> None:
    config = python(tmp_path, MMCV + "model = dict(type='Petr3D', pts_bbox_head=dict(type='PETRHead'), neck=dict())")
    assert facts.heads(config) == {"pts_bbox_head": "PETRHead"}
    path = tmp_path / "seg.yaml"
    path.write_text("model: {encoders: null, heads: {object: null, map: {type: BEVSegmentationHead}}}\n")
    assert facts.heads(read_foreign(path)) == {"map": "BEVSegmentationHead"}


def test_changes_rank_above_the_files(tmp_path: Path) -> None:
    text = MMCV + "optimizer_config = dict(type='Fp16OptimizerHook', grad_clip=dict(max_norm=35))\n"
    config = python(tmp_path, text)
    off = changed(config, {"optimizer_config": {"_delete_": True, "grad_clip": {"max_norm": 35}}})
    assert off.get("optimizer_config") == {"grad_clip": {"max_norm": 35}}
    assert facts.half_precision(off).on is False
    more = changed(config, {"data.samples_per_gpu": 7, "data.workers_per_gpu": 0})
    assert (facts.batch_per_gpu(more), facts.workers_per_gpu(more)) == (7, 0)
    assert facts.batch_per_gpu(config) == 2
    path = tmp_path / "c.yaml"
    path.write_text("max_epochs: 6\nrunner: {max_epochs: '${max_epochs}'}\noptimizer: 1\n")
    assert facts.epochs(changed(read_foreign(path), {"max_epochs": 2})) == 2
