"""What must hold between the values of a PETRv2 config."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bevctl.config.problem import Problem
from bevctl.config.schema import MapHeadConfig, ModelConfig, ObjectHeadConfig, PetrConfig

MAP_SCALE = 8
"""Cells of the map to one query of the map head, along each axis."""
_OF_PETR = {"hidden": "hidden", "attention_heads": "attention_heads", "ffn": "ffn", "dropout": "dropout"}
_OF_BEVFUSION = ("nms_kernel", "box_z", "heatmap_weight")


def petr_problems(model: ModelConfig) -> Iterator[Problem]:
    """The rules that a config of type petrv2 breaks."""
    if model.lidar:
        yield Problem("model.lidar", "model.lidar is given, but petrv2 sees with cameras alone.", "Set it to null.")
    if model.camera is None:
        yield Problem("model.camera", "model.camera is null, but petrv2 sees with cameras alone.", "Give model.camera.")
    elif model.camera.view:
        message = "model.camera.view is given, but petrv2 has no view transform."
        yield Problem("model.camera.view", message, "Set it to null.")
    if model.camera and model.camera.backbone == "swin":
        message = "model.camera.backbone is swin, which gives a map of stride 8 that petrv2 does not read."
        yield Problem("model.camera.backbone", message, "Use vovnet, or a timm model such as resnet50.")
    if model.petr is None:
        message = "model.type is petrv2, but model.petr is null."
        yield Problem("model.petr", message, "Give model.petr; {} takes the defaults.")
        return
    yield from _sizes(model.petr)
    if model.object:
        yield from _object(model.object)
    if model.map:
        yield from _map(model.map, model.petr)


def _sizes(petr: PetrConfig) -> Iterator[Problem]:
    if petr.hidden % petr.attention_heads:
        message = f"model.petr: {petr.attention_heads} attention heads do not divide hidden {petr.hidden}."
        yield Problem("model.petr.attention_heads", message, "Use a divisor, for example 8 for 256.")
    if petr.hidden % 4:
        message = f"model.petr.hidden is {petr.hidden}; half of it are pairs of sine and cosine."
        yield Problem("model.petr.hidden", message, "Use a multiple of 4.")
    if petr.depth_start >= petr.position_range[3]:
        message = f"model.petr.depth_start is {petr.depth_start}, beyond position_range at {petr.position_range[3]}."
        yield Problem("model.petr.depth_start", message, "Start nearer.")


def _object(head: ObjectHeadConfig) -> Iterator[Problem]:
    """What the detection head of petrv2 does not read is not set."""
    defaults = {field.name: field.default for field in dataclasses.fields(ObjectHeadConfig)}
    for name in (*_OF_PETR, *_OF_BEVFUSION):
        value = getattr(head, name)
        if value != defaults[name]:
            message = f"model.object.{name} is {value}, but only bevfusion has it."
            hint = f"Set model.petr.{_OF_PETR[name]}." if name in _OF_PETR else "Leave it out."
            yield Problem(f"model.object.{name}", message, hint)


def _map(head: MapHeadConfig, petr: PetrConfig) -> Iterator[Problem]:
    for name, (low, high, step), queries in zip(
        ("xbound", "ybound"), (head.xbound, head.ybound), petr.map_queries, strict=True
    ):
        cells = round((high - low) / step) if step > 0 else 0
        if cells != MAP_SCALE * queries:
            message = f"model.map.{name} gives {cells} cells, and {queries} queries make {MAP_SCALE * queries}."
            yield Problem(f"model.map.{name}", message, "Make model.petr.map_queries an eighth of the cells.")
