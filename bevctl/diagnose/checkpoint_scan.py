"""A run's checkpoints, the newest first: what in them is not finite or cannot be, and the last one that is clean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.engine.checkpoint_report import FINITE, SCALER, CheckpointReport, floating_tensors, inspect_checkpoint
from bevctl.errors import BevctlError
from bevctl.finding import Evidence, Severity

LARGEST_FP16 = 65504.0
POISONED, BEYOND_FP16 = "NAN110", "NAN111"


@dataclass(frozen=True)
class Scan:
    """What the checkpoints tell."""

    findings: tuple[DiagnoseFinding, ...] = ()
    last_clean: Path | None = None
    looked_at: tuple[str, ...] = field(default=())


def scan_checkpoints(paths: Sequence[Path], half: bool, say: Callable[[str], None], named: Path | None = None) -> Scan:
    """Reads from the newest back to the first clean one, as what is not finite stays so.

    Args:
        paths: oldest first.
        half: the run trains in FP16.
        named: the one that the user asked about; another that cannot be read is passed over.

    Raises:
        BevctlError: `named` cannot be read.
    """
    bad: list[tuple[Path, list[DiagnoseFinding]]] = []
    looked_at = []
    for path in reversed(paths):
        say(f"Reading {path}")
        report = inspect_checkpoint(path)
        if report.checkpoint is None and path == named:
            raise BevctlError(report.findings[0].title, report.findings[0].fix or "")
        if report.checkpoint is None:
            looked_at.append(f"{path} was not read: {report.findings[0].title}")
            continue
        found = [*_of_report(report), *_impossible(report), *(_beyond_half(report) if half else ())]
        if not any(finding.severity is Severity.FAIL for finding in found):
            fresh = (
                "; it holds no loss scale, so that FP16 starts with a fresh one"
                if half and not report.loss_scaler
                else ""
            )
            looked_at.append(f"{path}: weights, statistics, optimizer and loss scale are finite{fresh}")
            return Scan((*_told(bad, path), *found), path, tuple(looked_at))
        bad.append((path, found))
    return Scan(tuple(_told(bad, None)), None, tuple(looked_at))


def _told(bad: Sequence[tuple[Path, list[DiagnoseFinding]]], clean: Path | None) -> Iterator[DiagnoseFinding]:
    """The findings of the oldest bad checkpoint, which say what was spoiled first, with the way back."""
    if not bad:
        return
    oldest, findings = bad[-1]
    names = ", ".join(path.name for path, _ in reversed(bad))
    where = [Evidence("checkpoints", f"spoiled: {names}; last clean one: {clean or 'none found'}")]
    way_back = Remedy({}, f"continue from {clean}" if clean else "start again from before this checkpoint")
    for finding in findings:
        yield DiagnoseFinding(
            finding.id,
            finding.severity,
            finding.confidence,
            f"{oldest.name}: {finding.title}",
            (*finding.evidence, *where),
            finding.cause,
            (way_back, *finding.fix),
        )


def _of_report(report: CheckpointReport) -> Iterator[DiagnoseFinding]:
    """Values that are not finite, by what holds them, and the state of the loss scale."""
    kinds = Counter(_kind_of(entry.key) for entry in report.nonfinite)
    shares = (Evidence("kinds", ", ".join(f"{kind}: {count} tensors" for kind, count in kinds.items())),)
    for finding in report.of(FINITE, SCALER):
        evidence = (*finding.evidence, *(shares if finding.id == FINITE else ()))
        fix = (Remedy({}, finding.fix),) if finding.fix and finding.id == SCALER else ()
        yield DiagnoseFinding(finding.id, finding.severity, 0.95, finding.title, evidence, finding.cause, fix)
    scale = (report.loss_scaler or {}).get("scale")
    if isinstance(scale, float | int) and 1 <= scale < math.inf and math.frexp(scale)[0] != 0.5:
        yield DiagnoseFinding(
            SCALER,
            Severity.INFO,
            0.6,
            f"The saved loss scale, {scale:g}, is no power of two",
            (Evidence("loss_scaler.scale", f"{scale:g}"),),
            "It was fixed by hand, or moved by factors other than 2 and 1/2.",
        )


def _kind_of(key: str) -> str:
    if key.startswith("optimizer."):
        return "optimizer moments"
    if key.startswith("ema"):
        return "averaged weights"
    return "BatchNorm statistics" if key.endswith(("running_mean", "running_var")) else "weights"


def _impossible(report: CheckpointReport) -> Iterator[DiagnoseFinding]:
    """Variances below zero: finite in the file, NaN at their first use."""
    assert report.checkpoint is not None
    tensors = floating_tensors(report.checkpoint)
    negative = [key for key, tensor in tensors if _is_variance(key) and bool((tensor.real < 0).any())]
    if negative:
        yield DiagnoseFinding(
            POISONED,
            Severity.FAIL,
            0.95,
            f"Variances of {len(negative)} tensors are negative",
            tuple(Evidence(key, "holds values below 0") for key in negative[:8]),
            "The square root of a negative variance is NaN: BatchNorm statistics or Adam's second moment were damaged "
            "in memory, by a wrong cast or by an edited file.",
        )


def _is_variance(key: str) -> bool:
    return key.endswith(("running_var", ".exp_avg_sq"))


def _beyond_half(report: CheckpointReport) -> Iterator[DiagnoseFinding]:
    """Weights that become infinite when they are cast to FP16."""
    assert report.checkpoint is not None
    large = {}
    for key, tensor in floating_tensors(report.checkpoint):
        if _kind_of(key) == "weights" and tensor.numel():
            sizes = tensor.abs()
            largest = float(torch.where(sizes.isfinite(), sizes, 0.0).max())
            if largest > LARGEST_FP16:
                large[key] = largest
    if large:
        yield DiagnoseFinding(
            BEYOND_FP16,
            Severity.FAIL,
            0.9,
            f"Weights of {len(large)} tensors are above FP16's largest number, 65504",
            tuple(Evidence(key, f"largest {value:.4g}") for key, value in list(large.items())[:8]),
            "They are infinite once they are cast to FP16: the training diverged before.",
            (Remedy({"precision.dtype": "bf16"}, "BF16 or FP32 holds them; better go back to before they grew"),),
        )
