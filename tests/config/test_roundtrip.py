"""A config survives being written and read, whatever its values."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from bevctl.config import schema
from bevctl.config.layers import keys
from bevctl.config.load import from_dict, load, to_dict, to_yaml
from bevctl.config.render import annotated_yaml
from bevctl.config.values import Spec, specs_of
from bevctl.errors import BevctlError

texts = st.text(st.characters(codec="utf-8"), max_size=8)


def numbers(spec: Spec, kind: type) -> st.SearchStrategy[Any]:
    """Numbers of the field's range."""
    low, high, above = (spec.metadata[name] for name in ("low", "high", "above"))
    if kind is int:
        return st.integers(low if low is not None else -(10**9), high if high is not None else 10**9)
    bound = low if above is None else above
    exclusive = above is not None
    return st.floats(bound, high, exclude_min=exclusive, allow_nan=False, allow_infinity=False)


def values(spec: Spec, hint: Any = None) -> st.SearchStrategy[Any]:
    """Any value that the schema allows for a field."""
    hint = spec.hint if hint is None else hint
    if hint in (int, float):
        return numbers(spec, hint)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.sampled_from(spec.metadata["choices"]) if spec.metadata["choices"] else texts
    if dataclasses.is_dataclass(hint):
        return sections(typing.cast(type, hint))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and arguments[1] is ...:
        return st.lists(values(spec, arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is tuple:
        return st.tuples(*[values(spec, argument) for argument in arguments])
    return st.one_of([st.none() if a is type(None) else values(spec, a) for a in arguments])


def sections(section: type) -> st.SearchStrategy[Any]:
    return st.builds(section, **{name: values(spec) for name, spec in specs_of(section).items()})


free_groups = st.lists(
    st.builds(
        schema.ParamGroupConfig,
        match=texts.filter(bool),
        lr=st.floats(0, 10),
        decay=st.floats(0, 10),
    ),
    max_size=3,
).map(tuple)
scales = st.just("dynamic") | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
best = st.sampled_from(["", "mAP", "NDS", "mIoU"])
configs = st.builds(
    schema.Config,
    name=texts.filter(lambda text: text not in ("", ".", "..") and "/" not in text),
    seed=st.integers(0, 2**63),
    work_dir=st.none() | texts,
    data=st.builds(schema.DataConfig, root=texts, info_train=texts, augment=st.booleans()),
    train=st.builds(
        lambda section, metric: dataclasses.replace(section, best=metric), sections(schema.TrainConfig), best
    ),
    optim=st.builds(
        lambda section, groups: dataclasses.replace(section, groups=groups, lr_scaling="none"),
        sections(schema.OptimConfig),
        free_groups,
    ),
    precision=st.builds(
        lambda section, scale: dataclasses.replace(section, loss_scale=scale), sections(schema.PrecisionConfig), scales
    ),
    expect=st.dictionaries(
        texts.filter(lambda t: t and "." not in t), st.sampled_from(["1:2", ":3e-1", "0.5:"]), max_size=3
    ),
)


@settings(max_examples=60)
@given(configs)
def test_to_dict_and_back(config: schema.Config) -> None:
    plain = to_dict(config)
    assert from_dict(plain) == config
    assert to_dict(config) == plain


@settings(max_examples=60)
@given(config=configs)
def test_to_yaml_and_back(tmp_path_factory: pytest.TempPathFactory, config: schema.Config) -> None:
    path = tmp_path_factory.mktemp("roundtrip") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load(path).config == config


@pytest.mark.parametrize("name", ["tiny", "bevfusion_lidar", "bevfusion_camera", "bevfusion_multitask_fp16"])
def test_packaged_configs_and_back(name: str, tmp_path: Path) -> None:
    config = load(name).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(tmp_path / "config.yaml").config == config


def test_the_text_gives_every_value_once() -> None:
    text = to_yaml(schema.Config())
    assert yaml.safe_load(text) == to_dict(schema.Config())
    assert "&" not in text
    assert "classes: [car, truck," in text


def test_annotated_text_is_the_same_config_with_an_origin_a_value(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train:\n  batch: 7\noptim:\n  groups: [{match: a}]\n")
    loaded = load(tmp_path / "my.yaml", sets=["seed=3"])
    text = annotated_yaml(loaded.config, loaded.origins)
    assert yaml.safe_load(text) == to_dict(loaded.config)
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["batch"].endswith("my.yaml:2")
    assert lines["seed"].endswith("# --set seed=3")
    assert lines["epochs"].endswith("# default")


def test_every_value_has_an_origin() -> None:
    opened = load("bevfusion_multitask_fp16", sets=["data.paste.min_points=5"])
    absent = ("model.petr", "model.mmdet3d", "data.previous")
    inside = {key for key in keys() for section in absent if key.startswith(f"{section}.")}
    assert set(opened.origins) == (set(keys()) - {"expect"} - inside) | set(absent)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {"bacth": 1}}, "unknown key 'train.bacth'"),
        ({"train": {"batch": 0}}, "train.batch must be at least 1"),
        ({"train": {"batch": "4"}}, "train.batch must be a whole number"),
        ({"train": {"batch": object()}}, "is not a plain value"),
        ({1: 2}, "unknown key '1'"),
        ({}, None),
    ],
)
def test_data_is_checked_like_a_file(data: dict[Any, Any], message: str | None) -> None:
    if message is None:
        assert from_dict(data) == schema.Config()
        return
    with pytest.raises(BevctlError, match=message):
        from_dict(data)


def test_every_field_of_the_schema_has_help_and_a_valid_default() -> None:
    def check(section: type) -> None:
        for spec in specs_of(section).values():
            assert spec.metadata["help"], f"{section.__name__}.{spec.name}"
            if spec.section:
                check(spec.section)

    check(schema.Config)
    assert from_dict(to_dict(schema.Config())) == schema.Config()
