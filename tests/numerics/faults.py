"""Faults put into a nano model or its batch, each with what a trace must say about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.models.transfusion import ObjectOutputs, TransFusionHead

HALF, SINGLE = torch.float16, torch.float32


@dataclass(frozen=True)
class Fault:
    """One fault and its diagnosis."""

    name: str
    module: str
    """Innermost module of the culprit, or the start of its name up to a dot."""
    verdict: str
    break_model: Callable[[nn.Module], None] = lambda _: None
    break_batch: Callable[[Batch], Batch] = lambda batch: batch
    dtype: torch.dtype = SINGLE
    phase: str = "forward"
    op: str = ""
    """Start of the operation's name; "" for any."""
    samples: tuple[int, ...] | None = None
    """Expected samples, None where any answer will do."""
    source: str = ""
    """Name of the guilty input or weight."""
    masked_by: str = ""
    """Start of the name of the operation that hides it."""
    twin_model: Callable[[nn.Module], None] | None = None
    """A change that looks alike and harms nothing; None: the same change, in FP32."""
    twin_batch: Callable[[Batch], Batch] = lambda batch: batch


class Then(nn.Module):
    """A module whose output goes through a function."""

    def __init__(self, inner: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.function = function

    def forward(self, *args: object) -> Tensor:
        return self.function(self.inner(*args))


class Scaled(nn.Module):
    """A module whose input is multiplied."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner = inner
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.factor * x.float())


class PlainAttention(nn.Module):
    """Window attention whose logits are in the autocast dtype, as in many repositories."""

    def __init__(self, inner: nn.Module, gain: float) -> None:
        super().__init__()
        self.inner = inner
        self.gain = gain

    def forward(self, x: Tensor, _: Tensor | None) -> Tensor:
        query, key, value = (self.gain * self.inner.get_submodule("qkv")(x)).chunk(3, dim=-1)
        return self.inner.get_submodule("proj")((query @ key.transpose(-2, -1)).softmax(-1).to(value.dtype) @ value)


def enlarged(path: str, factor: float) -> Callable[[nn.Module], None]:
    """Multiplies the weight of a module."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(f"{path}.weight").mul_(factor)

    return change


def followed(path: str, function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Sends the output of a module through `function`, inside a module of the same name."""
    return wrapped(path, lambda module: Then(module, function))


def wrapped(path: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def bad_weight(name: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] = torch.nan

    return change


def float_images(batch: Batch) -> Batch:
    assert batch.images is not None
    return dataclasses.replace(batch, images=batch.images.float() / 255 - 0.5)


def inf_pixel(batch: Batch) -> Batch:
    batch = float_images(batch)
    assert batch.images is not None
    batch.images[1, 0, 2, 3, 4] = torch.inf
    return batch


def bad_points(column: int, sample: int, value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        assert batch.points is not None
        batch.points[sample][7, column] = value
        return batch

    return change


def bad_box(column: int | tuple[int, ...], value: float) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        batch.boxes[1][2, column] = value
        return batch

    return change


def flat_camera(batch: Batch) -> Batch:
    batch.calibration.intrinsics[1, 0, :3, :3] = 0
    return batch


def masked_rows(first: int) -> Callable[[Tensor], Tensor]:
    """Attention over cells of which all from `first` on are masked."""

    def attend(x: Tensor) -> Tensor:
        logits = x.flatten(2)
        masked = torch.arange(logits.shape[-1], device=x.device) >= first
        return x * logits.masked_fill(masked, -torch.inf).softmax(-1).view_as(x)

    return attend


def lateral_sum(gain: float) -> Callable[[Tensor], Tensor]:
    """The sum of two equal maps of half precision with values up to 1.5 × `gain`."""

    def add(x: Tensor) -> Tensor:
        level = x.half().clamp(min=1, max=1.5) * gain
        return level + level

    return add


class HalfLossHead(TransFusionHead):
    """A heatmap loss in half precision, where 1e-12 is zero and a sigmoid reaches 1."""

    def loss(self, outputs: ObjectOutputs, _: Batch) -> dict[str, Tensor]:
        probability = torch.sigmoid(outputs.heatmap.half() + 12)
        return {"loss/object/loss_heatmap": -torch.log(1 - probability + 1e-12).float().mean()}


def half_loss(model: nn.Module) -> None:
    model.get_submodule("heads.object").__class__ = HalfLossHead


def unchanged(_: nn.Module) -> None:
    """Leaves a model as it is."""


FAULTS = [
    Fault(
        "image backbone",
        "encoders.camera.backbone.stages.1.blocks.0.ffn.layers.0.0",
        "overflow",
        enlarged("encoders.camera.backbone.stages.1.blocks.0.ffn.layers.0.0", 5e5),
        dtype=HALF,
        op="aten.addmm",
    ),
    Fault(
        "lateral convolution of the image pyramid",
        "encoders.camera.neck.lateral_convs.0.conv",
        "overflow",
        enlarged("encoders.camera.neck.lateral_convs.0.conv", 5e4),
        dtype=HALF,
        op="aten.convolution",
    ),
    Fault(
        "lateral sum of a pyramid",
        "encoders.camera.neck.fpn_convs.0",
        "overflow",
        followed("encoders.camera.neck.fpn_convs.0", lateral_sum(4e4)),
        dtype=HALF,
        op="aten.add",
        samples=(0, 1),
        twin_model=followed("encoders.camera.neck.fpn_convs.0", lateral_sum(1e3)),
    ),
    Fault(
        "lift-splat",
        "encoders.camera.vtransform.depthnet.6",
        "overflow",
        enlarged("encoders.camera.vtransform.depthnet.6", 2e5),
        dtype=HALF,
    ),
    Fault(
        "sums of splat cells on their way into half precision",
        "encoders.camera.vtransform.downsample.inner.0",
        "overflow",
        wrapped("encoders.camera.vtransform.downsample", lambda down: Scaled(down, 1e6)),
        dtype=HALF,
        op="aten._to_copy",
    ),
    Fault(
        "map head",
        "heads.map.classifier.3",
        "overflow",
        enlarged("heads.map.classifier.3", 8e5),
        dtype=HALF,
        op="aten.convolution",
    ),
    Fault(
        "attention logits",
        "encoders.camera.backbone.stages.2.blocks.0.attn.w_msa",
        "overflow",
        wrapped("encoders.camera.backbone.stages.2.blocks.0.attn.w_msa", lambda inner: PlainAttention(inner, 3e3)),
        dtype=HALF,
        op="aten.bmm",
    ),
    Fault("heatmap loss", "heads.object", "underflow", half_loss, op="aten.log", twin_model=unchanged),
    Fault(
        "logarithm of zero",
        "fuser",
        "code",
        followed("fuser", lambda x: x + (0 * x).log()),
        op="aten.log",
        twin_model=followed("fuser", lambda x: x + (x.abs() + 1).log()),
    ),
    Fault(
        "softmax of masked rows",
        "decoder",
        "code",
        followed("decoder", masked_rows(0)),
        op="aten._softmax",
        twin_model=followed("decoder", masked_rows(3)),
    ),
    Fault(
        "division by zero in the backward pass only",
        "decoder",
        "code",
        followed("decoder", lambda x: x + (0 * x).abs().sqrt()),
        phase="backward",
        op="aten.div",
        twin_model=followed("decoder", lambda x: x + (x.abs() + 1).sqrt()),
    ),
    Fault(
        "a module that masks NaN",
        "decoder",
        "code",
        followed("decoder", lambda x: torch.nan_to_num(x / torch.where(x > 0.1, x.detach(), 0 * x.detach()), 0, 0, 0)),
        op="aten.div",
        masked_by="aten.nan_to_num",
        twin_model=followed("decoder", torch.nan_to_num),
    ),
    Fault(
        "NaN weight",
        "decoder.neck.deblocks.0.0",
        "weights",
        bad_weight("decoder.neck.deblocks.0.0.weight"),
        source="decoder.neck.deblocks.0.0.weight",
        twin_model=unchanged,
    ),
    Fault(
        "infinite pixel",
        "encoders.camera.backbone.patch_embed",
        "data",
        break_batch=inf_pixel,
        samples=(1,),
        source="batch.images",
        twin_batch=float_images,
    ),
    Fault(
        "NaN intensity",
        "encoders.lidar",
        "data",
        break_batch=bad_points(3, 1, torch.nan),
        samples=(1,),
        source="batch.points[1]",
        twin_batch=bad_points(3, 1, 0.0),
    ),
    Fault(
        "NaN position of a point",
        "encoders.",
        "data",
        break_batch=bad_points(0, 0, torch.nan),
        samples=(0,),
        source="batch.points[0]",
        masked_by="aten.where",
        twin_batch=bad_points(0, 0, 300.0),
    ),
    Fault(
        "NaN box",
        "heads.object",
        "data",
        break_batch=bad_box(0, torch.nan),
        samples=(1,),
        source="batch.boxes[1]",
        twin_batch=bad_box(8, torch.nan),
    ),
    Fault(
        "huge box",
        "heads.object",
        "data",
        break_batch=bad_box((3, 4), 1e30),
        samples=(1,),
        op="aten.mul",
        twin_batch=bad_box((3, 4), 30.0),
    ),
    Fault(
        "flat camera",
        "encoders.camera.vtransform",
        "data",
        break_batch=flat_camera,
        samples=(1,),
        op="aten.linalg_inv",
        masked_by="aten.where",
    ),
]
