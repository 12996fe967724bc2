"""A checkpoint written anew in the layout of bevctl, mit-bevfusion, mmdet3d or PETR."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bevctl
from bevctl.config.load import from_dict, to_dict
from bevctl.config.schema import Config
from bevctl.engine.checkpoint import FORMAT, Checkpoint, is_derived, load_state, to_our_layout
from bevctl.engine.class_order import check_class_order
from bevctl.engine.load_report import LoadReport, part_of
from bevctl.engine.resume import foreign_parameter_states
from bevctl.errors import BevctlError
from bevctl.models.build import build_model
from bevctl.models.layouts import BACKBONE, family, of_task, our_name, tasks, to_mit, to_mmdet3d, to_petr


@dataclass(frozen=True)
class Layout:
    """Another project's files."""

    name: str
    """The project."""
    family: str
    """The model family that its files hold, by its name in `model.type`."""
    export: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
    """Our state as it names and orders it."""


LAYOUTS = {
    "mit": Layout("mit-bevfusion", "bevfusion", to_mit),
    "mmdet3d": Layout("mmdet3d", "bevfusion", to_mmdet3d),
    "petr": Layout("PETR", "petrv2", to_petr),
}
_FAMILIES = {"bevfusion": "BEVFusion", "petrv2": "PETRv2"}


@dataclass(frozen=True)
class Conversion:
    """A converted checkpoint, not yet written."""

    content: dict[str, Any]
    layout: str
    """Layout that the file had."""
    parts: dict[str, dict[str, int]]
    """Our entries of each part by what became of them: written, reshaped (among the written), left out."""
    notes: list[str]
    report: LoadReport | None
    """How the weights fit the model of the config that was given."""


@dataclass(frozen=True)
class Target:
    """What a checkpoint is to become."""

    layout: str
    """bevctl, or one of `LAYOUTS`."""
    boxes: str = "auto"
    """Box convention of the file's detection head: lwh, wlh, or auto."""
    task: str | None = None
    """The only task to keep: object or map."""
    config: Config | None = None
    """The model that the weights belong to."""
    min_loaded: float = 1.0
    """Share of that model's entries that the file must have."""


def convert_checkpoint(checkpoint: Checkpoint, target: Target) -> Conversion:
    """What to write for a checkpoint of any known layout.

    Ours keeps epoch, iteration, loss scale and AdamW's averages, so that a run can go on from it; the others get
    weights. Averaged weights (EMA) take the place of the last ones.

    Raises:
        BevctlError: unknown names, a decoder for each task where the layout has one, or weights that do not fit.
    """
    state, layout, notes = to_our_layout(checkpoint, target.boxes)
    if layout == "unknown":
        known = "bevctl, mit-bevfusion, mmdet3d (BEVFusion), PETR, and backbones of Swin and VoVNet"
        raise BevctlError(
            f"{checkpoint.path} has names such as {next(iter(state))!r}, which bevctl has no model for.",
            f"Known: {known}.",
        )
    as_read = {id(value) for value in checkpoint.state_dict.values()}
    average = checkpoint.content.get("ema")
    if isinstance(average, Mapping):
        state = {**state, **{key: value for key, value in average.items() if key in state}}
        as_read |= {id(value) for value in average.values()}
    report = None
    if target.config is not None:
        check_class_order(checkpoint, target.config)
        model = build_model(target.config)
        report = load_state(model, checkpoint, target.boxes)
        report.require(share_of_model=target.min_loaded)
        state = _with_derived(state, model.state_dict())
        notes = report.sentences()[1:]
    if isinstance(average, Mapping):
        notes.append("Averaged weights (EMA) written, as evaluation uses them")
    kept = _of_task(state, target)
    written = LAYOUTS[target.layout].export(kept) if target.layout in LAYOUTS else kept
    if target.layout != "bevctl":
        notes += _export_notes(checkpoint, kept, target, layout)
    under_our_names = {our_name(key, target.layout): value for key, value in written.items()}
    return Conversion(
        content=_content(checkpoint, {key: _as_stored(value) for key, value in written.items()}, target),
        layout=layout,
        parts=_by_part(state, under_our_names, as_read),
        notes=notes,
        report=report,
    )


def _with_derived(state: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state in the order of the model's, with the model's values of what follows from the config."""
    derived = {key: value for key, value in model.items() if is_derived(key)}
    ordered = {key: derived.get(key, state.get(key)) for key in model}
    return {key: value for key, value in ordered.items() if value is not None} | {
        key: value for key, value in state.items() if key not in model
    }


def _of_task(state: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    """The entries to write: of one task where one is asked for, or where the layout knows no other."""
    layout, kind = LAYOUTS.get(target.layout), family(state)
    if layout is not None and kind not in ("", layout.family):
        others = " or ".join(key for key, other in LAYOUTS.items() if other.family == kind)
        raise BevctlError(
            f"The weights are those of {_FAMILIES[kind]}, and {layout.name} has no model for them.",
            f"Write them with --to {others} or bevctl.",
        )
    heads = sorted({key.split(".")[1] for key in state if key.startswith("heads.")})
    task = target.task
    if task is None and target.layout == "mmdet3d":
        task = "object"
    if task is not None and task not in heads and (target.task is not None or heads):
        raise BevctlError(
            f"The file has no head for the task {task!r}; its heads: {', '.join(heads) or 'none'}.",
            "mmdet3d's BEVFusion has a detection head alone." if target.task is None else "Give another --task.",
        )
    if task is not None:
        return of_task(state, task)
    several = {"mit": ("a decoder for each task", tasks(state)), "petr": ("two heads", heads[1:])}
    what, found = several.get(target.layout, ("", []))
    if layout is not None and found:
        raise BevctlError(
            f"The model has {what}, and one of {layout.name} has a single one.",
            "Write each task to a file of its own: --task object, --task map.",
        )
    return dict(state)


def _export_notes(checkpoint: Checkpoint, state: Mapping[str, Tensor], target: Target, layout: str) -> Iterator[str]:
    """What the other project's programs will see differently; `layout` is that of the file."""
    name, config = LAYOUTS[target.layout].name, target.config or _own_config(checkpoint)
    is_resnet = f"{BACKBONE}model.layer1.0.conv1.weight" in state
    if any(key.startswith(f"{BACKBONE}model.") for key in state) and not (is_resnet and target.layout == "petr"):
        yield f"The image backbone is one of timm, which {name} has no model for"
    if target.layout == "petr":
        return
    box_z = _box_z(config, state, layout)
    if box_z == "top" and target.layout == "mmdet3d":
        yield "The head predicts the top of a box, which mmdet3d takes for its centre: half a height too high"
    if box_z == "centre" and target.layout == "mit":
        yield "The head predicts the centre of a box; mit-bevfusion raises it by half a height when it trains on"
    view = config.model.camera.view if config is not None and config.model.camera is not None else None
    if view is not None and not view.truncate:
        yield (
            f"{name} puts frustum points from below the bounds into its first cells, which this model has not seen: "
            "for its programs train with model.camera.view.truncate=true"
        )


def _box_z(config: Config | None, state: Mapping[str, Tensor], layout: str) -> str:
    """What the detection head's height means, as of `model.object.box_z`; empty where nothing says."""
    if not any(key.startswith("heads.object.") for key in state):
        return ""
    if config is not None and config.model.object is not None:
        return config.model.object.box_z
    return {"mit": "top", "mmdet3d": "centre"}.get(layout, "")


def _own_config(checkpoint: Checkpoint) -> Config | None:
    config = checkpoint.meta.get("config")
    return from_dict(config) if checkpoint.origin == "bevctl" and isinstance(config, Mapping) else None


def _as_stored(value: Tensor) -> Tensor:
    """Floating-point values in single precision, each tensor with memory of its own."""
    return (value.float() if value.is_floating_point() else value).detach().clone(memory_format=torch.contiguous_format)


def _by_part(
    state: Mapping[str, Tensor], written: Mapping[str, Tensor], as_read: set[int]
) -> dict[str, dict[str, int]]:
    """Counts of the entries of `state` by part; `written` has what was written under the same names."""
    counts: dict[str, dict[str, int]] = {}
    for key in state:
        part = counts.setdefault(part_of(key), {"written": 0, "reshaped": 0, "left out": 0})
        value = written.get(key)
        part["left out"] += value is None
        part["written"] += value is not None
        part["reshaped"] += value is not None and id(value) not in as_read
    return counts


def _content(checkpoint: Checkpoint, state: dict[str, Tensor], target: Target) -> dict[str, Any]:
    config = target.config or _own_config(checkpoint)
    if target.layout == "bevctl":
        meta: dict[str, Any] = {"epoch": checkpoint.epoch, "iter": checkpoint.iteration}
        source = {"file": checkpoint.path.name, "origin": checkpoint.origin}
        meta |= {"format": FORMAT, "version": bevctl.__version__, "converted_from": source}
        meta |= {"config": to_dict(config)} if config is not None else {}
        return {
            "state_dict": state,
            "optimizer": _optimizer(checkpoint) if target.boxes == "auto" and target.task is None else None,
            "scaler": checkpoint.loss_scaler,
            "meta": meta,
        }
    # Their programs read both without asking.
    meta = {"epoch": checkpoint.epoch or 0, "iter": checkpoint.iteration or 0}
    meta["exported_by"] = f"bevctl {bevctl.__version__}"
    if config is not None:
        classes = list(config.data.classes)
        meta |= {"dataset_meta": {"classes": classes}} if target.layout == "mmdet3d" else {"CLASSES": classes}
    return {"meta": meta, "state_dict": state}


def _optimizer(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """AdamW's state in our form, by parameter name; None where the file has none that belongs to its weights."""
    saved = checkpoint.content.get("optimizer")
    if not isinstance(saved, Mapping) or not saved.get("state"):
        return None
    if checkpoint.origin == "bevctl":
        return dict(saved)
    states = foreign_parameter_states(checkpoint)
    group = {"params": list(range(len(states))), "names": list(states)}
    return {"state": dict(enumerate(states.values())), "param_groups": [group]} if states else None
