"""Checkpoint files of other projects, and every way in which one can be broken."""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SCALER = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


def weights() -> dict[str, Tensor]:
    """A few entries under names of mit-bevfusion, with BatchNorm statistics."""
    return {
        "encoders.camera.neck.lateral_convs.0.conv.weight": torch.ones(4, 2, 1, 1),
        "fuser.1.running_mean": torch.zeros(8),
        "fuser.1.running_var": torch.ones(8),
        "fuser.1.num_batches_tracked": torch.tensor(7),
    }


def mmcv(**changes: Any) -> dict[str, Any]:
    """What mmcv's runner writes after the first epoch of an FP16 run."""
    state = {0: {"step": 400, "exp_avg": torch.zeros(4, 2, 1, 1), "exp_avg_sq": torch.zeros(4, 2, 1, 1)}}
    content = {
        "meta": {"epoch": 1, "iter": 400, "mmcv_version": "1.4.0", "fp16": {"loss_scaler": dict(SCALER)}},
        "state_dict": weights(),
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-4, "initial_lr": 2e-4, "params": [0]}]},
    }
    return {**content, **changes}


def save(content: Any, path: Path, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


def mmengine_history(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with an object of a class of mmengine, which is not installed when it is read."""
    module = types.ModuleType("mmengine.logging.history_buffer")

    class HistoryBuffer:
        def __init__(self) -> None:
            self.values = [1.0]

    HistoryBuffer.__module__, HistoryBuffer.__qualname__ = module.__name__, "HistoryBuffer"
    module.HistoryBuffer = HistoryBuffer  # type: ignore[attr-defined]
    content = mmcv(meta={"epoch": 1, "iter": 400, "mmengine_version": "0.10.7"})
    content["optimizer"]["loss_scaler"] = dict(SCALER)
    with monkeypatch.context() as patch:
        for name in ("mmengine", "mmengine.logging"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        save({**content, "message_hub": {"log_scalars": {"loss": HistoryBuffer()}}}, path)
    return path


class _Runs:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


def names_code(path: Path, mark: Path, legacy: bool = False) -> Path:
    """A file that would make `mark` when its pickle is run."""
    content = {**mmcv(), "extra": _Runs(os.system, f"touch {mark}")}
    return save(content, path, _use_new_zipfile_serialization=not legacy)


def _cut(whole: bytes, share: float) -> bytes:
    return whole[: int(len(whole) * share)]


def _flipped(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]


def broken_bytes() -> dict[str, bytes]:
    """Name → content of a file that is no whole checkpoint."""
    buffer = io.BytesIO()
    torch.save(mmcv(), buffer)
    whole = buffer.getvalue()
    legacy = io.BytesIO()
    torch.save(mmcv(), legacy, _use_new_zipfile_serialization=False)
    old = legacy.getvalue()
    data = whole.index(torch.ones(8).numpy().tobytes())
    return {
        "empty": b"",
        "one byte": whole[:1],
        "magic alone": whole[:4],
        "cut at 30 %": _cut(whole, 0.3),
        "cut at 60 %": _cut(whole, 0.6),
        "cut at 99 %": _cut(whole, 0.99),
        "without the end record": whole[:-22],
        "without the last byte": whole[:-1],
        "a flipped bit in a tensor": _flipped(whole, data + 2),
        "a flipped bit in the pickle": _flipped(whole, whole.index(b"state_dict") + 1),
        "legacy, cut at 30 %": _cut(old, 0.3),
        "legacy, cut at 60 %": _cut(old, 0.6),
        "legacy, cut at 99 %": _cut(old, 0.99),
        "legacy, first bytes": old[:10],
        "legacy, a storage that is not there": re.sub(rb"\d{12,}", b"1" * 15, old, count=1),
        "a web page": b"<!DOCTYPE html><html><body>Not found</body></html>",
        "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "noise": bytes((i * 37 + 11) % 256 for i in range(5000)),
        "zeros": bytes(4096),
        "text": b"epoch 1\n",
        "a plain pickle of a list": pickle.dumps([1, 2, 3]),
        "a pickle that is too deep": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        "an endless memo": b"\x80\x02" + b"h\x00" * 10 + b".",
        "a zip of something else": _zip(),
    }


def _zip() -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("hello.txt", "hello")
    return buffer.getvalue()
