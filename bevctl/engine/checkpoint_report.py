"""What a checkpoint file is worth: whole, plain data, finite, and with what it takes to continue a run."""

from __future__ import annotations

import math
import pickle
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bevctl.engine.checkpoint import Checkpoint
from bevctl.engine.unpickle import ForbiddenName, read_pickle
from bevctl.errors import BevctlError
from bevctl.finding import Evidence, Finding, Severity
from bevctl.models.layouts import recognise, unwrapped

COMPLETE, PLAIN, FINITE, RESUMABLE, SCALER = "FILE003", "FILE004", "FILE005", "FILE007", "FILE008"
"""Ids of the findings, which are those of preflight's checks of the same matters."""
LOW_SCALE = 128.0
"""Below this a dynamic loss scale has sunk so far that small gradients vanish in FP16."""
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_WEB_PAGE = (b"<!doc", b"<html", b"<?xml")
_NO_CHECKPOINT = (TypeError, ValueError, RuntimeError, LookupError, AttributeError, OverflowError)
"""What a file raises that is plain data, but of shapes that no program would save."""
_COPY_AGAIN = "Use an older checkpoint, or copy the file again."


@dataclass(frozen=True)
class NonFinite:
    """NaN and infinite values of one tensor."""

    key: str
    """Name in the state dict, or `optimizer.…`, `ema.…`, `ema_state_dict.…` (mmengine)."""
    count: int


@dataclass(frozen=True)
class CheckpointReport:
    """Everything that can be said about a checkpoint file; the content fields are empty where it cannot be read."""

    path: Path
    findings: tuple[Finding, ...]
    size_bytes: int = 0
    checkpoint: Checkpoint | None = None
    layout: str = "unknown"
    """See `layout_of`."""
    nonfinite: tuple[NonFinite, ...] = ()
    parts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """First levels of the entries' names → number of entries, number of values."""
    loss_scaler: Mapping[str, float | str] | None = None
    """State of the loss scaler; a value that is no number is given as text."""

    @property
    def is_broken(self) -> bool:
        return any(finding.severity is Severity.FAIL for finding in self.findings)

    def of(self, *ids: str) -> list[Finding]:
        """The findings with one of these ids."""
        return [finding for finding in self.findings if finding.id in ids]


def inspect_checkpoint(path: Path) -> CheckpointReport:
    """Reads a file as a checkpoint and judges it; nothing in it is executed, and no file makes this raise."""
    refusal = _refusal(path)
    if refusal is not None:
        return CheckpointReport(path, (refusal,))
    size = path.stat().st_size
    try:
        content = read_pickle(path)
    except BevctlError as error:
        return CheckpointReport(path, (_unreadable(path, error),), size)
    except RecursionError:
        return CheckpointReport(path, (_broken(COMPLETE, path, "nested too deeply to be a checkpoint"),), size)
    if not isinstance(content, Mapping):
        said = f"holds a {type(content).__name__}, not a checkpoint"
        return CheckpointReport(path, (_broken(COMPLETE, path, said),), size)
    try:
        return _judged(Checkpoint(path, dict(content)), size)
    except _NO_CHECKPOINT as error:
        said = f"holds what no checkpoint holds: {type(error).__name__}: {error!s:.100}"
        return CheckpointReport(path, (_broken(COMPLETE, path, said),), size)


def _judged(checkpoint: Checkpoint, size: int) -> CheckpointReport:
    nonfinite = tuple(_nonfinite(checkpoint))
    scaler = _plain_scaler(checkpoint)
    findings = [
        *_missing_weights(checkpoint),
        *_objection_to_plain_loading(checkpoint.path),
        *_nonfinite_findings(nonfinite),
        *_scaler_findings(scaler),
        *_losses_on_resume(checkpoint),
    ]
    return CheckpointReport(
        path=checkpoint.path,
        findings=tuple(findings),
        size_bytes=size,
        checkpoint=checkpoint,
        layout=layout_of(checkpoint),
        nonfinite=nonfinite,
        parts=_parts(checkpoint),
        loss_scaler=scaler,
    )


def layout_of(checkpoint: Checkpoint) -> str:
    """Whose names the entries have: a layout of `to_ours`, or, where it is unknown, who wrote the file."""
    if checkpoint.origin == "bevctl":
        return "bevctl"
    names = recognise(unwrapped(str(key)) for key in checkpoint.state_dict)
    if names != "unknown":
        return names
    return checkpoint.origin if checkpoint.origin in ("mmcv", "mmengine") else "unknown"


def _refusal(path: Path) -> Finding | None:
    """What is wrong with a file that need not be opened as a checkpoint at all."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            return _broken(COMPLETE, path, f"is {kind}", "Give the checkpoint file itself.")
        with path.open("rb") as file:
            head = file.read(8)
    except (OSError, ValueError) as error:
        return _broken(COMPLETE, path, _os_sentence(path, error), "Check the path and its permissions.")
    if not head:
        return _broken(COMPLETE, path, "is empty: it was never written to the end", _COPY_AGAIN)
    if head.lower().startswith(_WEB_PAGE):
        return _broken(COMPLETE, path, "is a web page: the download went wrong", "Download it again.")
    if not head.startswith((_ZIP, _PICKLE)):
        return _broken(COMPLETE, path, "is no file that torch.save writes", "Give a .pth file.")
    return None


def _os_sentence(path: Path, error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        try:
            dangling = path.is_symlink()
        except (OSError, ValueError):
            dangling = False
        return "is a link to a file that does not exist" if dangling else "does not exist"
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"cannot be read: {reason}"


def _unreadable(path: Path, error: BevctlError) -> Finding:
    """The finding for what `read_pickle` raised."""
    if isinstance(error.__cause__, ForbiddenName):
        return _broken(
            PLAIN,
            path,
            f"names {error.__cause__}, which is code and not data; nothing of the file was executed",
            "Do not load it elsewhere either, unless you trust where it comes from.",
        )
    if "not a zip file" in str(error.__cause__):
        said = f"is truncated at {path.stat().st_size:,} bytes: the end of the archive is missing"
        return _broken(COMPLETE, path, said, _COPY_AGAIN)
    reason = " ".join(str(error.__cause__ or error.message).split())
    return _broken(COMPLETE, path, f"is truncated or damaged: {reason:.200}", _COPY_AGAIN)


def _broken(id: str, path: Path, said: str, fix: str = "") -> Finding:
    return Finding(id, Severity.FAIL, f"{path} {said}.", (Evidence(str(path), said),), "", fix or _COPY_AGAIN)


def _missing_weights(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.state_dict:
        return
    known = checkpoint.content.keys() & {"meta", "optimizer", "message_hub"}
    keys = ", ".join(map(str, list(checkpoint.content)[:8])) or "none"
    yield Finding(
        COMPLETE,
        Severity.WARN if known else Severity.FAIL,
        f"{checkpoint.path} holds no model weights.",
        (Evidence(str(checkpoint.path), f"its keys: {keys}"),),
        "",
        "Give a checkpoint with a state_dict.",
    )


def _objection_to_plain_loading(path: Path) -> Iterator[Finding]:
    """What torch's own weights-only reader says against a file that ours has read."""
    with path.open("rb") as file:
        zipped = file.read(4) == _ZIP
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (pickle.UnpicklingError, RuntimeError, AttributeError, TypeError) as error:
        named = str(error).split("Unsupported global: GLOBAL ")
        what = named[1].split(" ")[0] if len(named) > 1 else " ".join(str(error).split())[:120]
        yield Finding(
            PLAIN,
            Severity.INFO,
            f"torch.load refuses {path} under weights_only, the default since torch 2.6; bevctl reads it.",
            (Evidence(str(path), f"it holds {what}"),),
            "It holds objects of another project beside its tensors.",
            "With other programs: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1, if you trust the file.",
        )


def _nonfinite(checkpoint: Checkpoint) -> Iterator[NonFinite]:
    for key, tensor in floating_tensors(checkpoint):
        count = int((~torch.isfinite(tensor)).sum())
        if count:
            yield NonFinite(key, count)


def floating_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Every dense floating-point or complex tensor by name: weights, `optimizer.…`, `ema.…`; 8-bit ones as FP32."""
    tensors: list[tuple[str, Any]] = list(checkpoint.state_dict.items())
    for name in ("optimizer", "ema", "ema_state_dict"):
        tensors.extend(_tensors_of(checkpoint.content.get(name), name))
    for key, tensor in tensors:
        is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
        if is_dense and (tensor.is_floating_point() or tensor.is_complex()):
            yield str(key), tensor if tensor.element_size() > 1 else tensor.float()  # isfinite lacks the 8-bit types


def _tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every tensor inside mappings and lists."""
    waiting = [(name, value)]
    seen: set[int] = set()
    while waiting:
        key, item = waiting.pop()
        if isinstance(item, Tensor):
            yield key, item
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            children = item.items() if isinstance(item, Mapping) else enumerate(item)
            waiting.extend((f"{key}.{child}", below) for child, below in children)


def _nonfinite_findings(nonfinite: tuple[NonFinite, ...]) -> Iterator[Finding]:
    if not nonfinite:
        return
    total = sum(entry.count for entry in nonfinite)
    statistics = [entry.key for entry in nonfinite if entry.key.endswith(("running_mean", "running_var"))]
    cause = "BatchNorm statistics were spoiled by an overflowing forward pass." if statistics else ""
    yield Finding(
        FINITE,
        Severity.FAIL,
        f"{total:,} values in {len(nonfinite)} tensors are NaN or infinite.",
        tuple(Evidence(entry.key, f"{entry.count:,} values") for entry in nonfinite[:8]),
        cause or "The run went on after its weights or their averages had become non-finite.",
        "Continue from an older checkpoint: every step from this one is lost.",
    )


def _plain_scaler(checkpoint: Checkpoint) -> dict[str, float | str] | None:
    scaler = checkpoint.loss_scaler
    if scaler is None:
        return None
    items = {str(k): v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in scaler.items()}
    return {key: value if isinstance(value, int | float) else str(value) for key, value in items.items()}


def _scaler_findings(scaler: Mapping[str, float | str] | None) -> Iterator[Finding]:
    if scaler is None:
        return
    scale = float(scaler["scale"]) if not isinstance(scaler["scale"], str) else math.nan
    if not math.isfinite(scale) or scale < 1:
        yield Finding(
            SCALER,
            Severity.FAIL,
            f"The saved loss scale is {scaler['scale']}: no step can be taken with it.",
            (Evidence("loss_scaler.scale", str(scaler["scale"])),),
            "The scale halved at every overflow until nothing was left: the gradients had been non-finite for long.",
            "Continue from an older checkpoint, or with --load-from, which starts with a fresh scale.",
        )
    elif scale < LOW_SCALE:
        yield Finding(
            SCALER,
            Severity.WARN,
            f"The saved loss scale is {scale:g}, below {LOW_SCALE:g}: small gradients vanish in FP16.",
            (Evidence("loss_scaler.scale", f"{scale:g}"),),
            "Many steps overflowed before this checkpoint was written.",
            "Look at its log first: `bevctl diagnose nan`; then continue from before the scale sank.",
        )


def _losses_on_resume(checkpoint: Checkpoint) -> Iterator[Finding]:
    lost = lost_on_resume(checkpoint, half=_was_half(checkpoint))
    if lost:
        yield Finding(
            RESUMABLE,
            Severity.INFO,
            f"A run that continues from it starts anew with: {'; '.join(lost)}.",
            tuple(Evidence(what, then) for what, then in lost.items()),
        )


def _was_half(checkpoint: Checkpoint) -> bool:
    """Whether the run that wrote the file had a loss scale, as far as it says."""
    setting = checkpoint.meta.get("setting")
    return not isinstance(setting, Mapping) or setting.get("precision") == "fp16"


def lost_on_resume(checkpoint: Checkpoint, half: bool) -> dict[str, str]:
    """What the file lacks and a continued run starts anew → what that means; `half`: the run will be in FP16."""
    lost = {}
    optimizer = checkpoint.content.get("optimizer")
    if checkpoint.epoch is None:
        lost["epoch"] = "training starts at epoch 1"
    if not isinstance(optimizer, Mapping) or not optimizer.get("state"):
        lost["optimizer state"] = "AdamW's averages are rebuilt in some hundred steps, the loss may rise a little"
    if half and checkpoint.loss_scaler is None:
        lost["loss scale"] = "FP16 starts at 65536 and skips the first steps until the scale fits"
    if checkpoint.origin != "bevctl":
        lost["data order and random state"] = "the epoch's samples are drawn anew from the seed"
    return lost


def _parts(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    entries: Counter[str] = Counter()
    values: Counter[str] = Counter()
    for key, tensor in checkpoint.state_dict.items():
        levels = unwrapped(str(key)).split(".")
        prefix = ".".join(levels[:-1][:2] or levels)
        entries[prefix] += 1
        values[prefix] += tensor.numel()
    return {prefix: (count, values[prefix]) for prefix, count in entries.items()}
