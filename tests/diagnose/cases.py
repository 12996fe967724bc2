"""Runs of other projects, made up for tests: small logs, configs and checkpoints with numbers of our own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from bevctl.config.load import to_yaml
from bevctl.config.schema import Config, OptimConfig, PrecisionConfig, TrainConfig
from bevctl.diagnose.report import DiagnoseFinding, DiagnoseRequest, Diagnosis
from bevctl.diagnose.topics import diagnose
from bevctl.finding import Severity
from bevctl.runs.writer import SCHEMA
from tests.runs.logs import mmcv_line, mmcv_message, write

ASSIGNER = (
    "Traceback (most recent call last):",
    '  File "tools/train.py", line 88, in <module>',
    "    main()",
    '  File "models/heads/assigner.py", line 131, in assign',
    "    rows, columns = linear_sum_assignment(cost)",
    "ValueError: matrix contains invalid numeric entries",
)
"""What the Hungarian assigner ends a run with."""
CRASHING_FP16 = "fp16 = dict(loss_scale='dynamic')\n"


def windows(count: int, changes: Mapping[int, Mapping[str, str]] | None = None, /, **all: str) -> list[str]:
    """That many windows of 50 iterations (8 an epoch) whose loss falls; `changes` of single windows, counted from 1."""
    lines = []
    for number in range(1, count + 1):
        epoch, inner = divmod((number - 1) * 50, 400)
        usual: dict[str, Any] = {"loss": f"{2 + 6 / number:.4f}", "grad_norm": f"{8 + number % 3:.4f}", **all}
        lines.append(mmcv_line(epoch + 1, inner + 50, **{**usual, **(changes or {}).get(number, {})}))
    return lines


def header(config: str = "", gpus: str = "", name: str = "NVIDIA A100-SXM4-40GB") -> list[str]:
    """What mmcv writes before the first iteration: environment and config."""
    env = [*([f"GPU {gpus}: {name}"] if gpus else []), "PyTorch: 1.10.1+cu113"]
    return [
        mmcv_message(-2, "Environment info:", logger="mmdet"),
        "-" * 60,
        *env,
        "-" * 60,
        "",
        mmcv_message(-1, f"Config:\n{config}", logger="mmdet"),
        mmcv_message(0, "Start running, host: a@b, work_dir: /tmp/w", logger="mmdet"),
    ]


def mmcv_config(batch: int = 4, lr: float = 2e-4, model: str = "BEVFusion", more: str = "") -> str:
    """A config of mmcv's kind."""
    return (
        f"model = dict(type='{model}')\ndata = dict(samples_per_gpu={batch}, workers_per_gpu=2)\n"
        f"optimizer = dict(type='AdamW', lr={lr})\n{more}"
    )


def ask(topic: str, run: Path | None, **given: Any) -> Diagnosis:
    """The answer to a question about files."""
    return diagnose(topic, DiagnoseRequest(run=run, **given))


def ask_log(topic: str, folder: Path, lines: Iterable[str], **given: Any) -> Diagnosis:
    """The answer about a log of these lines."""
    return ask(topic, write(folder / "20260203_040506.log", lines), **given)


def found(diagnosis: Diagnosis) -> dict[str, str]:
    """Severity by id of what is more than information."""
    return {f.id: f.severity.value for f in diagnosis.findings if f.severity is not Severity.INFO}


def the(diagnosis: Diagnosis, id: str) -> DiagnoseFinding:
    """The one finding with this id."""
    (finding,) = [finding for finding in diagnosis.findings if finding.id == id]
    return finding


def evidence(finding: DiagnoseFinding) -> str:
    """All evidence as one text."""
    return "\n".join(f"{item.where}: {item.what}" for item in finding.evidence)


def mmcv_checkpoint(path: Path, scale: float | None = None, epoch: int = 1, /, **state: torch.Tensor) -> Path:
    """A checkpoint as mmcv's runner writes it, with a loss scaler where `scale` is given."""
    weights = {"backbone.conv.weight": torch.ones(4, 3), "backbone.bn.running_var": torch.ones(4), **state}
    meta: dict[str, Any] = {"epoch": epoch, "iter": 400 * epoch, "mmcv_version": "1.4.0"}
    if scale is not None:
        meta["fp16"] = {"loss_scaler": scaler(scale)}
    moments = {0: {"step": 400, "exp_avg": torch.zeros(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    optimizer = {"state": moments, "param_groups": [{"params": [0], "lr": 2e-4}]}
    torch.save({"state_dict": weights, "optimizer": optimizer, "meta": meta}, path)
    return path


def scaler(scale: float) -> dict[str, float | int]:
    """State of a GradScaler."""
    return {
        "scale": scale,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }


def own_run(
    folder: Path,
    columns: Mapping[str, Any],
    records: int,
    events: Iterable[dict[str, Any]] = (),
    interval: int = 1,
    **optim: Any,
) -> Path:
    """A run of bevctl in FP16 with these columns, `interval` iterations a record."""
    config = Config(
        name="own",
        train=TrainConfig(batch=4),
        optim=OptimConfig(**{"lr": 2e-5, "warmup": 500, "clip": 35.0, **optim}),
        precision=PrecisionConfig(dtype="fp16"),
    )
    rows = [
        {
            "epoch": 1 + row * interval // 500,
            "iter": (row + 1) * interval,
            "time": 1.79e9 + row,
            **{name: float(column[row]) for name, column in columns.items()},
        }
        for row in range(records)
    ]
    write(folder / "log.jsonl", map(json.dumps, rows))
    write(folder / "events.jsonl", map(json.dumps, events))
    write(folder / "config.yaml", [to_yaml(config)])
    segment = {"iter": 0, "precision": "fp16", "batch": 4, "world": 1, "accumulate": 1, "lr": config.optim.lr}
    document = {"schema": SCHEMA, "status": "finished", "segments": [segment], "iters_per_epoch": 500}
    (folder / "run.json").write_text(json.dumps(document))
    return folder
