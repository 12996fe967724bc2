"""What an mmengine config asks for, by our keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevctl.config.load import from_dict
from bevctl.config.mmdet3d_keys import inner_data_set, translate, type_name
from bevctl.config.schema import Config
from bevctl.config.sections import sections_of

ADAMW = {"type": "AdamW", "lr": 1e-4, "weight_decay": 0.05, "betas": (0.95, 0.99)}
EPOCHS = {"type": "EpochBasedTrainLoop", "max_epochs": 12, "val_interval": 2}
NUSCENES = {"dataset": {"type": "NuScenesDataset", "ann_file": "val.pkl"}}


def _config(**sections: Any) -> Config:
    """The config of ours that sections of an mmengine config become."""
    base = {"optim_wrapper": {"optimizer": ADAMW}, "train_cfg": EPOCHS, "val_dataloader": NUSCENES}
    return from_dict(sections_of(translate({**base, **sections}).values))


def test_optimizer_loop_and_data() -> None:
    inner = {"type": "NuScenesDataset", "data_root": "d/", "ann_file": "t.pkl", "metainfo": {"classes": ["car", "bus"]}}
    config = _config(
        train_dataloader={"batch_size": 3, "num_workers": 5, "dataset": {"type": "CBGSDataset", "dataset": inner}},
        point_cloud_range=[-54, -54, -5, 54, 54, 1],
        randomness={"seed": 7, "deterministic": True},
        work_dir="there",
        load_from="w.pth",
    )
    assert (config.optim.lr, config.optim.weight_decay, config.optim.betas) == (1e-4, 0.05, (0.95, 0.99))
    assert (config.train.batch, config.train.workers, config.train.epochs, config.train.eval_interval) == (3, 5, 12, 2)
    assert (config.data.root, config.data.info_train, config.data.info_val) == ("d/", "t.pkl", "val.pkl")
    assert config.data.classes == ("car", "bus")
    assert config.model.point_cloud_range == (-54.0, -54.0, -5.0, 54.0, 54.0, 1.0)
    assert (config.seed, config.train.deterministic, config.work_dir) == (7, True, "there")
    assert config.model.load_from == ("w.pth",)


def test_what_is_not_there_is_as_in_mmengine() -> None:
    config = _config(optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-4}})
    assert config.optim.clip is None
    assert config.optim.weight_decay == 0.01
    assert (config.optim.schedule, config.optim.warmup) == ("constant", 0)
    assert config.precision.dtype == "fp32"


@pytest.mark.parametrize(
    ("wrapper", "dtype", "scale"),
    [
        ({"type": "AmpOptimWrapper"}, "fp16", "dynamic"),
        ({"type": "AmpOptimWrapper", "dtype": "bfloat16"}, "bf16", "dynamic"),
        ({"type": "mmengine.optim.AmpOptimWrapper", "dtype": "torch.float16", "loss_scale": 512.0}, "fp16", 512.0),
        ({"type": "AmpOptimWrapper", "loss_scale": {"init_scale": 1024, "growth_interval": 100}}, "fp16", "dynamic"),
    ],
)
def test_precision(wrapper: dict[str, Any], dtype: str, scale: float | str) -> None:
    found = _config(optim_wrapper={**wrapper, "optimizer": ADAMW}).precision
    assert (found.dtype, found.loss_scale) == (dtype, scale)
    assert found.init_scale == (1024 if isinstance(wrapper.get("loss_scale"), dict) else 65536)


def test_clipping_and_accumulation() -> None:
    optim = {"type": "OptimWrapper", "optimizer": ADAMW, "accumulative_counts": 4}
    assert _config(optim_wrapper={**optim, "clip_grad": {"max_norm": 10}}).optim.clip == 10
    assert _config(optim_wrapper=optim).train.accumulate == 4
    other = translate({"optim_wrapper": {**optim, "clip_grad": {"clip_value": 1.0}}})
    assert other.values["optim.clip"] is None
    assert "optim_wrapper.clip_grad (only L2 norms are clipped here)" in other.left


def test_the_longest_custom_key_comes_first_as_in_mmengine() -> None:
    keys = {"a": {"lr_mult": 0.1}, "backbone.norm": {"decay_mult": 0.0}, "b": {}, "backbone": {"lr_mult": 0.5}}
    paramwise = {"custom_keys": keys, "norm_decay_mult": 0.0}
    groups = _config(optim_wrapper={"optimizer": ADAMW, "paramwise_cfg": paramwise}).optim.groups
    assert [group.match for group in groups] == ["backbone.norm", "backbone", "a", "b"]
    assert (groups[0].decay, groups[1].lr) == (0.0, 0.5)
    left = translate({"optim_wrapper": {"optimizer": ADAMW, "paramwise_cfg": paramwise}}).left
    assert left == ["optim_wrapper.paramwise_cfg.norm_decay_mult"]


@pytest.mark.parametrize(
    ("schedulers", "expected"),
    [
        ([{"type": "CosineAnnealingLR", "T_max": 12, "eta_min_ratio": 1e-3}], {"min_ratio": 1e-3, "cosine_steps": 12}),
        (
            [{"type": "CosineAnnealingLR", "T_max": 12, "eta_min": 1e-6, "convert_to_iter_based": True}],
            {"min_ratio": pytest.approx(1e-2), "cosine_steps": None},
        ),
        (
            [{"type": "MultiStepLR", "milestones": [8, 11], "gamma": 0.2}],
            {"schedule": "steps", "steps": (8 / 12, 11 / 12), "step_factor": 0.2},
        ),
        ([{"type": "StepLR", "step_size": 4}], {"schedule": "steps", "steps": (4 / 12, 8 / 12), "step_factor": 0.1}),
        (
            [
                {"type": "CosineAnnealingLR", "T_max": 4, "eta_min": 1e-3, "end": 4},
                {"type": "CosineAnnealingLR", "T_max": 8, "eta_min": 1e-8, "begin": 4, "end": 12},
                {"type": "CosineAnnealingMomentum", "T_max": 4, "eta_min": 0.85 / 0.95},
            ],
            {"schedule": "cyclic", "cyclic_peak": pytest.approx(10), "cyclic_up": 4 / 12, "cyclic_momentum": True},
        ),
        ([{"type": "LinearLR", "by_epoch": False, "end": 501}], {"schedule": "constant", "warmup": 500}),
    ],
)
def test_schedules(schedulers: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    optim = _config(param_scheduler=schedulers).optim
    assert {key: getattr(optim, key) for key in expected} == expected


def test_what_cannot_be_taken_over_is_named() -> None:
    found = translate(
        {
            "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.02}},
            "param_scheduler": [{"type": "PolyLR"}, {"type": "LinearLR", "by_epoch": True}],
            "train_cfg": EPOCHS,
            "load_from": "https://example.org/x.pth",
            "custom_hooks": [{"type": "EMAHook"}],
            "sync_bn": "torch",
        }
    )
    told = " ".join(found.sentences("c.py"))
    for words in ("SGD: bevctl trains with AdamW", "PolyLR, LinearLR: no such schedule", "download it", "custom_hooks"):
        assert words in told
    assert "sync_bn" in told
    assert "optim.lr" not in found.values
    assert found.values["train.eval_interval"] == 0


def test_iterations_instead_of_epochs() -> None:
    config = _config(
        train_cfg={"by_epoch": False, "max_iters": 9000}, param_scheduler={"type": "StepLR", "step_size": 4500}
    )
    assert (config.train.schedule_iters, config.optim.steps) == (9000, (0.5,))


def test_the_data_set_inside_its_wrappers() -> None:
    inner = {"type": "KittiDataset"}
    wrapped = {"type": "RepeatDataset", "dataset": {"type": "ConcatDataset", "datasets": [inner, {}]}}
    assert type_name(inner_data_set(wrapped)) == "KittiDataset"
    assert type_name({"type": dict}) == "dict"
    assert inner_data_set(None) == {}


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = (
    "optim_wrapper",
    "train_cfg",
    "train_dataloader",
    "val_dataloader",
    "param_scheduler",
    "auto_scale_lr",
    "load_from",
)


@given(st.dictionaries(st.sampled_from(_KEYS), _PLAIN))
def test_nothing_but_errors_of_values_comes_of_nonsense(config: dict[str, Any]) -> None:
    """Those are told as one sentence where the file was read."""
    try:
        assert translate(config).values["optim.warmup"] >= 0
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        return
