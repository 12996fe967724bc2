"""Checkpoint files: writing them all or nothing, finding the newest, and loading weights from anybody's.

A checkpoint is a dict that torch.load(weights_only=True) reads: `state_dict`, `optimizer`, `meta` (epoch, iter,
version, config, setting, skipped_steps), `scaler`, `ema`, `rng` (one entry a rank), `data` (epoch, batch). The file's
zip records carry CRC-32 checksums, which `read_checkpoint` verifies.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevctl.engine.load_report import LoadReport, by_prefix
from bevctl.engine.unpickle import read_pickle
from bevctl.errors import BevctlError, ExitCode
from bevctl.files import atomic_path
from bevctl.models.layouts import exchange_box_convention, match_decoders, to_ours
from bevctl.models.layouts_petr import unequal_code_weights
from bevctl.models.layouts_swin import match_bias_tables
from bevctl.models.layouts_timm import match_backbone
from bevctl.models.mmdet3d import Detector
from bevctl.models.transfusion import TransFusionHead

FORMAT = "bevctl"
_WIDTH_FIRST = ("mit", "petr")
"""Layouts whose boxes are (w, l, h, -yaw - pi/2)."""
_BOX_BRANCHES = ("heads.object.prediction_heads.", "heads.object.reg_branches.")
_CONVERTED_BOXES = (
    "Detection head converted from mit-bevfusion's boxes (w, l, h, -yaw - pi/2) to (l, w, h, yaw)",
    "Detection head converted from PETR's yaw (-yaw - pi/2) to ours",
)
"""By whether it was PETR."""
_TOP = "If the head was trained by mit-bevfusion, it predicts the top of a box: model.object.box_z=top"
_TOP_FOR_CENTRE = (
    "This config takes the head's height for the centre of a box; if the head was trained by mit-bevfusion, it is the "
    "top: model.object.box_z=top"
)
_NUMBERED = re.compile(r"(epoch|iter)_\d+\.pth")
_GEOMETRY = ("dx", "bx", "nx", "frustum")
"""Entries of the view transform that follow from the config; other projects store them as frozen parameters."""
_DERIVED = (*_GEOMETRY, "relative_position_index")
_MAKE_ROOM = "Free some space, lower train.keep or choose another --work-dir, then continue with --resume auto."


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read: tensors on the CPU."""

    path: Path
    content: dict[str, Any]

    @property
    def meta(self) -> dict[str, Any]:
        meta = self.content.get("meta")
        return dict(meta) if isinstance(meta, Mapping) else {}

    @property
    def origin(self) -> str:
        """Who wrote it: bevctl, mmengine, mmcv, or weights for a bare state dict."""
        if self.meta.get("format") == FORMAT:
            return "bevctl"
        if "mmengine_version" in self.meta or "message_hub" in self.content:
            return "mmengine"
        return "mmcv" if self.meta else "weights"

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """The model's entries under the names of the file."""
        for key in ("state_dict", "model"):
            if isinstance(self.content.get(key), Mapping):
                return _tensors(self.content[key])
        return _tensors(self.content)

    @property
    def epoch(self) -> int | None:
        """Completed epochs."""
        return _count(self.meta.get("epoch"))

    @property
    def iteration(self) -> int | None:
        return _count(self.meta.get("iter"))

    @property
    def loss_scaler(self) -> dict[str, Any] | None:
        """GradScaler state where bevctl, mmcv's fp16 hook or mmengine's AMP wrapper puts it."""
        fp16 = self.meta.get("fp16")
        optimizer = self.content.get("optimizer")
        candidates = (
            self.content.get("scaler"),
            fp16.get("loss_scaler") if isinstance(fp16, Mapping) else None,
            optimizer.get("loss_scaler") if isinstance(optimizer, Mapping) else None,
        )
        found = (c for c in candidates if isinstance(c, Mapping) and {"scale", "_growth_tracker"} <= c.keys())
        return next((dict(c) for c in found), None)


def _tensors(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in entries.items() if isinstance(value, Tensor)}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint of any known origin without executing anything in it.

    Raises:
        BevctlError: the file cannot be read, is damaged, or holds no weights.
    """
    content = read_pickle(path)
    if not isinstance(content, Mapping) or not Checkpoint(path, dict(content)).state_dict:
        raise BevctlError(f"{path} holds no model weights.", "Give a checkpoint with a state_dict.")
    return Checkpoint(path, dict(content))


def write_checkpoint(path: Path, content: Mapping[str, Any], advice: str = _MAKE_ROOM) -> None:
    """Writes a checkpoint beside `path` and renames it: a crash or a full disk leaves what was there.

    `advice` is what to do where that cannot be.

    Raises:
        BevctlError: the disk is full or refuses (exit code 4).
    """
    try:
        with atomic_path(path) as temporary:
            torch.save(_on_cpu(content), temporary)
    except (OSError, RuntimeError) as error:  # torch's writer turns a failed write into RuntimeError
        free = shutil.disk_usage(path.parent).free / 1e9
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]
        raise BevctlError(
            f"Cannot write {path}: {reason} ({free:.1f} GB free on that disk). Earlier checkpoints are untouched.",
            advice,
            ExitCode.RUN_FAILED,
        ) from error


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item) for item in value)
    return value


def newest_checkpoints(work_dir: Path) -> list[Path]:
    """Checkpoints below `work_dir` that a resume may take, best choice first: `latest`, then by age."""
    numbered = (path for path in work_dir.iterdir() if _NUMBERED.fullmatch(path.name))
    found = sorted(numbered, key=lambda path: path.stat().st_mtime, reverse=True)
    with contextlib.suppress(OSError):
        latest = (work_dir / "latest").resolve(strict=True)
        found = [latest] + [path for path in found if path.resolve() != latest]
    return found


def load_weights(model: nn.Module, path: Path) -> LoadReport:
    """Loads the weights of a checkpoint of any known layout into `model`, entry by entry where name and shape agree.

    Raises:
        BevctlError: the file is unreadable, or not one entry fits.
    """
    return load_state(model, read_checkpoint(path))


def load_state(model: nn.Module, checkpoint: Checkpoint, boxes: str = "auto") -> LoadReport:
    """`load_weights` for a checkpoint that was read already; `boxes` as of `to_our_layout`."""
    ours = model.state_dict()
    state, layout, notes = reader_for(model)(checkpoint, boxes)
    if layout == "unknown":
        matched = match_backbone(state, ours)
        state, layout = matched, layout if matched.keys() == state.keys() else "timm_backbone"
    state = match_decoders(match_bias_tables(state, ours), ours)
    derived = {key for key in ours if is_derived(key)}
    fitting = {k: v for k, v in state.items() if k in ours and v.shape == ours[k].shape and k not in derived}
    if not fitting:
        raise BevctlError(
            f"Not one of the {len(state)} entries of {checkpoint.path} fits this model (layout: {layout}).",
            f"{_why_nothing_fits(state, ours, derived)} Choose the matching CONFIG.",
        )
    model.load_state_dict(fitting, strict=False)
    if _TOP in notes:
        notes.remove(_TOP)
        notes += [_TOP_FOR_CENTRE] if _height_of(model) == "centre" else []
    geometry = (key for key in sorted(derived & state.keys()) if key.rpartition(".")[2] in _GEOMETRY)
    differs = [key for key in geometry if not _same_values(state[key], ours[key])]
    if differs:
        notes.append(f"Geometry follows this config, not the file, which has another: {', '.join(differs)}")
    as_read = {id(value) for value in checkpoint.state_dict.values()}
    return LoadReport(
        source=str(checkpoint.path),
        layout=layout,
        loaded=list(fitting),
        reshaped=[key for key, value in fitting.items() if id(value) not in as_read],
        missing=[key for key in ours if key not in state and key not in derived and not _is_optional(key, state)],
        unexpected=[key for key in state if key not in ours],
        mismatched=[key for key in state if key in ours and key not in fitting and key not in derived],
        notes=notes,
    )


def _height_of(model: nn.Module) -> str:
    """What the model's detection head takes its height for, as of `model.object.box_z`; empty without TransFusion's."""
    head = dict(model.named_modules()).get("heads.object")
    return head.config.box_z if isinstance(head, TransFusionHead) else ""


def _why_nothing_fits(state: Mapping[str, Tensor], ours: Mapping[str, Tensor], derived: Collection[str]) -> str:
    other = next((key for key in ours if key in state and key not in derived), None)
    if other is None:
        return f"The file has {by_prefix(state)}; the model has {by_prefix(ours)}."
    shapes = tuple(state[other].shape), tuple(ours[other].shape)
    return f"Names agree and sizes do not: {other} is {shapes[0]} in the file and {shapes[1]} in the model."


def _is_optional(key: str, state: Mapping[str, Tensor]) -> bool:
    """Whether the entry is a count of batches that nothing reads, of a norm whose statistics are there."""
    norm, _, name = key.rpartition(".")
    return name == "num_batches_tracked" and f"{norm}.running_mean" in state


def is_derived(key: str) -> bool:
    """Whether the entry follows from the config and is not learned."""
    return key.rpartition(".")[2] in _DERIVED


def to_our_layout(checkpoint: Checkpoint, boxes: str = "auto") -> tuple[dict[str, Tensor], str, list[str]]:
    """A checkpoint's state under our names and conventions, the layout it had, and what to say about that.

    `boxes` is the convention of its detection head: lwh (ours), wlh (mit-bevfusion's and PETR's), or auto, which is wlh
    for files in their layouts that bevctl did not write.

    Raises BevctlError for PETR's layout with lwh, and where entries differ that are one.
    """
    if checkpoint.origin == "bevctl":
        state, layout = checkpoint.state_dict, "bevctl"
    else:
        state, layout = to_ours(checkpoint.state_dict)
    if layout == "petr" and boxes == "lwh":
        raise BevctlError(
            f"{checkpoint.path} is in PETR's layout, where width and length come from branches of their own, so that "
            "weights that learned them the other way round cannot be converted.",
            "If it was trained with boxes as w, l, h, -yaw - pi/2, as PETR's own files are, leave --boxes out.",
        )
    is_legacy = layout in _WIDTH_FIRST if boxes == "auto" else boxes == "wlh"
    notes = []
    if is_legacy and any(key.startswith(_BOX_BRANCHES) for key in state):
        state = exchange_box_convention(state)
        notes += [_CONVERTED_BOXES[True]] if layout == "petr" else [_CONVERTED_BOXES[False], _TOP]
    if layout == "petr" and (weights := unequal_code_weights(checkpoint.state_dict)):
        listed = ", ".join(f"{weight:g}" for weight in weights)
        notes.append(f"The file weighs the parts of a box by {listed} in its loss (code_weights), and bevctl by 1 each")
    return state, layout, notes


def _same_values(theirs: Tensor, ours: Tensor) -> bool:
    return theirs.shape == ours.shape and torch.allclose(theirs.double(), ours.cpu().double(), atol=1e-4)


Reader = Callable[[Checkpoint, str], tuple[dict[str, Tensor], str, list[str]]]
"""See `to_our_layout`."""


def reader_for(model: nn.Module) -> Reader:
    """How the entries of a checkpoint become those of `model`: as they are, where its names are another project's."""
    return _as_they_are if isinstance(model, Detector) else to_our_layout


def _as_they_are(checkpoint: Checkpoint, boxes: str) -> tuple[dict[str, Tensor], str, list[str]]:
    del boxes
    return checkpoint.state_dict, checkpoint.origin, []


def convert_like_weights(
    checkpoint: Checkpoint, values: Mapping[str, Tensor], read: Reader = to_our_layout
) -> dict[str, Tensor]:
    """`values`, one tensor a parameter under the file's names, renamed and reordered as the file's weights are."""
    stand_in = Checkpoint(checkpoint.path, {"meta": checkpoint.meta, "state_dict": dict(values)})
    return read(stand_in, "auto")[0]
