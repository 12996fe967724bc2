"""The configs that come with the package."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from bevctl.batch import MAP_CLASSES, OBJECT_CLASSES
from bevctl.config.document import packaged_folder, packaged_names
from bevctl.config.load import DEFAULT, load
from bevctl.config.schema import Config, DataConfig, ParamGroupConfig

NAMES = (
    "bevfusion_camera",
    "bevfusion_camera_seg",
    "bevfusion_det",
    "bevfusion_det_mit",
    "bevfusion_det_mmdet3d",
    "bevfusion_lidar",
    "bevfusion_lidar_mit",
    "bevfusion_lidar_seg",
    "bevfusion_multitask_fp16",
    "bevfusion_multitask_fp16_batch2",
    "bevfusion_multitask_fp16_batch4",
    "bevfusion_multitask_fp32",
    "bevfusion_multitask_task_decoders",
    "bevfusion_seg",
    "bevfusion_seg_mit",
    "petrv2",
    "petrv2_multitask",
    "petrv2_r50",
    "petrv2_seg",
    "petrv2_tiny",
    "tiny",
)


def config_of(name: str) -> Config:
    return load(name).config


def test_every_promised_config_is_there() -> None:
    assert set(NAMES) <= set(packaged_names())
    assert DEFAULT in NAMES


@pytest.mark.parametrize("name", packaged_names())
def test_each_resolves_without_a_note_under_its_own_name(name: str) -> None:
    loaded = load(name)
    assert loaded.notes == []
    assert loaded.config.name == name


@pytest.mark.parametrize("name", packaged_names())
def test_each_is_a_page_that_says_what_it_is_for(name: str) -> None:
    lines = (packaged_folder() / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) <= 120
    assert max(len(line) for line in lines) <= 120
    assert "base:" in "\n".join(lines) or len(lines) >= 60


def test_the_folder_of_the_package_is_the_one_of_the_checkout() -> None:
    assert packaged_folder().resolve() == Path(__file__).parents[2] / "configs"


def differences(a: Any, b: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys in which b differs from a, with b's values."""
    if not dataclasses.is_dataclass(a) or type(a) is not type(b):
        return {} if a == b else {prefix: b}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(a):
        below = f"{prefix}.{field.name}" if prefix else field.name
        found |= differences(getattr(a, field.name), getattr(b, field.name), below)
    return found


def test_the_multitask_configs_differ_only_in_what_their_names_say() -> None:
    fp16 = config_of("bevfusion_multitask_fp16")
    assert (fp16.train.batch, fp16.optim.lr, fp16.optim.warmup, fp16.optim.clip) == (1, 2e-5, 500, 35.0)
    assert (fp16.precision.dtype, fp16.precision.loss_scale) == ("fp16", "dynamic")
    assert fp16.model.object is not None
    assert fp16.model.map is not None
    changes: dict[str, dict[str, Any]] = {
        "bevfusion_multitask_fp32": {"precision.dtype": "fp32"},
        "bevfusion_multitask_fp16_batch4": {
            "train.batch": 4,
            "train.workers": 2,
            "optim.lr": 4e-5,
            "optim.warmup": 1000,
        },
        "bevfusion_multitask_fp16_batch2": {
            "train.batch": 2,
            "train.workers": 2,
            "optim.lr": 2.83e-5,
            "optim.warmup": 700,
        },
        "bevfusion_multitask_task_decoders": {"model.shared_decoder": False},
    }
    for name, change in changes.items():
        assert differences(fp16, config_of(name)) == {"name": name, **change}


@pytest.mark.parametrize("name", ["bevfusion_multitask_fp16_batch2", "bevfusion_multitask_fp16_batch4"])
def test_the_larger_batches_follow_the_square_root_rule_on_eight_gpus(name: str) -> None:
    config = config_of(name)
    optim = config.optim
    assert optim.base_batch is not None
    assert optim.base_lr is not None
    rule = optim.base_lr * math.sqrt(8 * config.train.batch / optim.base_batch)
    assert optim.lr == pytest.approx(rule, rel=1e-3)


RECIPES: dict[str, dict[str, Any]] = {
    "bevfusion_lidar": {
        "optim.lr": 1e-4,
        "optim.schedule": "cyclic",
        "optim.cyclic_peak": 10.0,
        "optim.cyclic_end": 1e-4,
        "train.epochs": 20,
        "train.batch": 4,
        "data.paste.stop_epoch": 15,
        "model.camera": None,
        "model.lidar.voxel_size": (0.075, 0.075, 0.2),
    },
    "bevfusion_det": {
        "optim.lr": 2e-4,
        "optim.schedule": "cosine",
        "optim.cosine_steps": 6,
        "optim.min_ratio": 1e-3,
        "optim.warmup": 500,
        "optim.cyclic_momentum": True,
        "optim.groups": (),
        "train.epochs": 6,
        "train.batch": 4,
        "data.paste": None,
        "model.camera.view.kind": "depth_lss",
        "model.camera.swin.drop_path": 0.2,
    },
    "bevfusion_seg": {
        "optim.lr": 1e-4,
        "optim.schedule": "cyclic",
        "optim.groups": (ParamGroupConfig("relative_position_bias_table", decay=0.0),),
        "train.epochs": 20,
        "train.batch": 4,
        "data.paste": None,
        "model.camera.view.kind": "lss",
        "model.camera.swin.drop_path": 0.3,
        "model.lidar.voxel_size": (0.1, 0.1, 0.2),
        "model.lidar.max_voxels": (90000, 120000),
    },
    "bevfusion_lidar_seg": {
        "optim.lr": 1e-4,
        "optim.schedule": "cyclic",
        "optim.groups": (),
        "train.epochs": 20,
        "data.paste": None,
        "model.camera": None,
        "model.lidar.voxel_size": (0.1, 0.1, 0.2),
    },
    "bevfusion_camera": {
        "optim.lr": 2e-4,
        "optim.schedule": "cyclic",
        "optim.cyclic_peak": 5.0,
        "optim.cyclic_end": 5e-5,
        "optim.groups": (
            ParamGroupConfig("relative_position_bias_table", decay=0.0),
            ParamGroupConfig("encoders.camera.backbone", lr=0.1),
        ),
        "train.epochs": 20,
        "train.batch": 6,
        "data.space.rotate": (-0.3925, 0.3925),
        "data.space.translate": 0.0,
        "data.space.scale": (0.95, 1.05),
        "model.lidar": None,
        "model.point_cloud_range": (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0),
    },
    "bevfusion_camera_seg": {
        "optim.lr": 1e-4,
        "optim.schedule": "cyclic",
        "optim.groups": (ParamGroupConfig("relative_position_bias_table", decay=0.0),),
        "train.epochs": 20,
        "train.batch": 4,
        "model.lidar": None,
    },
}
"""What the published BEVFusion recipes say, by config."""
COMMON: dict[str, Any] = {
    "optim.weight_decay": 0.01,
    "optim.clip": 35.0,
    "optim.cyclic_up": 0.4,
    "optim.cyclic_momentum": True,
    "data.cbgs": True,
    "data.sweeps": 9,
    "data.image.resize": (0.38, 0.55),
    "data.image.resize_eval": 0.48,
    "data.image.rotate": (-5.4, 5.4),
    "data.image.flip": True,
    "data.image.grid_mask": 0.0,
    "data.image.shared": False,
    "data.space.rotate": (-0.785398, 0.785398),
    "data.space.translate": 0.5,
    "data.space.scale": (0.9, 1.1),
    "data.space.flip": True,
    "data.classes": OBJECT_CLASSES,
    "data.map_classes": MAP_CLASSES,
    "optim.betas": (0.9, 0.999),
    "model.freeze": (),
    "precision.dtype": "fp16",
    "precision.loss_scale": "dynamic",
    "precision.growth_interval": 2000,
    "model.point_dtype": "fp32",
}


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_the_published_recipes(name: str) -> None:
    config = config_of(name)
    expected = COMMON | RECIPES[name]
    assert {key: value_of(config, key) for key in expected} == expected
    assert config.optim.base_batch == 8 * config.train.batch


def test_tiny_expects_the_data_that_synth_makes() -> None:
    data = config_of("tiny").data
    assert (data.root, data.info_train, data.info_val) == (
        "data/synth",
        "synth_infos_train.pkl",
        "synth_infos_val.pkl",
    )
    assert data.classes == DataConfig().classes
    assert config_of("tiny").precision.dtype == "auto"


@pytest.mark.parametrize(
    ("name", "epochs", "size"),
    [("petrv2", 24, (320, 800)), ("petrv2_multitask", 24, (320, 800)), ("petrv2_seg", 50, (928, 1600))],
)
def test_petrv2_follows_its_recipe(name: str, epochs: int, size: tuple[int, int]) -> None:
    config = config_of(name)
    data, model, optim, precision = config.data, config.model, config.optim, config.precision
    assert (optim.lr, optim.weight_decay, optim.clip) == (2e-4, 0.01, 1.0)
    assert (optim.schedule, optim.warmup, optim.min_ratio) == ("cosine", 500, 1e-3)
    assert (config.train.epochs, optim.cosine_steps, config.train.batch, optim.base_batch) == (epochs, epochs, 1, 8)
    assert optim.groups == (ParamGroupConfig("encoders.camera.backbone", lr=0.1),)
    assert (precision.dtype, precision.loss_scale, precision.init_scale) == ("fp16", "dynamic", 65536.0)
    assert (precision.growth_factor, precision.backoff_factor, precision.growth_interval) == (2.0, 0.5, 2000)
    assert data.previous is not None
    assert (data.previous.train, data.previous.eval) == ((3, 26), 14)
    assert (data.cbgs, data.image.grid_mask, data.image.shared) == (False, 0.7, True)
    assert model.camera is not None
    assert (model.camera.image_size, model.camera.norm_eval, model.camera.normalize) == (size, True, "imagenet_bgr")
    still = name == "petrv2_seg"
    assert data.image.resize == ((1.0, 1.0) if still else (0.47, 0.625))
    assert data.space.rotate == ((0.0, 0.0) if still else (-0.3925, 0.3925))
    assert data.space.scale == ((1.0, 1.0) if still else (0.95, 1.05))
    if model.map is not None:
        assert (model.map.focal_alpha, model.map.class_weights) == (0.5, (2.0, 4.0, 8.0))
