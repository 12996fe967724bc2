"""What configs of other projects ask for: precision above all, and by which file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from bevctl.config import foreign_facts as facts
from bevctl.config.foreign import ForeignConfig, read_foreign


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
