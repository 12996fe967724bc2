"""Lines of a log's text that name a numerical problem themselves, whoever wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bevctl.errors import BevctlError
from bevctl.finding import Evidence
from bevctl.runs.folder import find_logs
from bevctl.runs.lines import LineFile
from bevctl.runs.records import RunLog

_LONGEST = 200
_OWN_TEXT = ("console.log", "log.txt")


@dataclass(frozen=True)
class Telling:
    """A kind of line."""

    words: tuple[str, ...]
    """One of them is in every such line: a substring search costs far less than the pattern."""
    pattern: str
    meaning: str
    confidence: float
    """How sure such a line makes that numbers were not finite for the reason in `meaning`; 0: harmless."""


TELLING: dict[str, Telling] = {
    "anomaly": Telling(
        ("returned nan values",),
        r"Function '\w+' returned nan values in its \d+th output",
        "Autograd's anomaly mode names the operation whose backward pass gave NaN; its inputs were finite.",
        0.95,
    ),
    "clip": Telling(
        ("Non-finite norm",),
        r"Non-finite norm encountered in torch\.nn\.utils\.clip_grad_norm_",
        "Clipping met gradients that are not finite and went on: without a loss scaler that skips the step they reach "
        "the weights.",
        0.6,
    ),
    "scale_at_minimum": Telling(
        ("oss scale",),
        r"[Ll]oss scale already at minimum|[Mm]inimum loss scale reached",
        "The loss scale cannot go lower: NaN comes from the forward pass, which no scale helps, or gradients diverge.",
        0.7,
    ),
    "loss_check": Telling(
        ("oss become", "oss became", "oss is", "oss was", "diverged", "loss_value", "FloatingPointError"),
        r"[Ll]oss (?:become|became|is|was) (?:infinite|nan|inf|NaN|non-finite|not finite)\b|"
        r"Model diverged with loss = (?:NaN|nan|inf)|loss_value is nan|FloatingPointError",
        "A check of the training code saw a loss that is not finite.",
        0.6,
    ),
    "probabilities": Telling(
        ("probability tensor", "multinomial", "invalid values"),
        r"probability tensor contains either `?inf`?, `?nan`?|invalid multinomial distribution|"
        r"Expected (?:parameter|value argument) .* to satisfy the constraint .* but found invalid values",
        "A distribution was built from NaN: a late symptom of NaN in the outputs of the network.",
        0.7,
    ),
    "conversion": Telling(
        ("cannot convert float", "contains NaN", "must not contain infs"),
        r"cannot convert float (?:NaN|infinity) to integer|Input (?:X )?contains NaN|"
        r"array must not contain infs or NaNs",
        "Code that works on the network's outputs met NaN: a late symptom of NaN in the forward pass.",
        0.7,
    ),
    "bar": Telling(
        ("loss=nan", "loss: nan"),
        r"(?:\d+%\|.*|\bit/s.*|s/it.*)\bloss[=:]\s*nan\b",
        "The progress bar shows a NaN loss. Bars often show a running mean, which stays NaN after one bad iteration.",
        0.4,
    ),
    "half_weights": Telling(
        ("unscale FP16",),
        r"Attempting to unscale FP16 gradients",
        "The weights themselves are FP16 (model.half()), where small updates are lost; a loss scale needs FP32.",
        0.9,
    ),
    "scheduler": Telling(
        ("lr_scheduler.step()",),
        r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
        "Harmless at the start of FP16 training: the first step was skipped while the loss scale was found.",
        0.0,
    ),
}
"""By name; a line tells the first that fits."""


@dataclass(frozen=True)
class TellingLine:
    """A kind of line that a log has."""

    name: str
    """A key of TELLING."""
    count: int
    first: Evidence

    @property
    def telling(self) -> Telling:
        return TELLING[self.name]


def telling_lines(log: RunLog) -> list[TellingLine]:
    """The kinds of line in the log's text and in what a shell captured of the same run, in their order."""
    found: dict[str, TellingLine] = {}
    for path in _texts(log):
        for number, line, name in _matches(path):
            known = found.get(name)
            first = known.first if known is not None else Evidence(f"{path.name}:{number}", line.strip()[:_LONGEST])
            found[name] = TellingLine(name, known.count + 1 if known is not None else 1, first)
    return list(found.values())


def _texts(log: RunLog) -> list[Path]:
    if log.format == "tensorboard":
        return []
    folder = log.path if log.path.is_dir() else None
    if log.format == "bevctl":
        own = Path(log.header.get("work_dir") or log.path.parent)
        return [own / name for name in _OWN_TEXT if (own / name).is_file()]
    try:
        logs = find_logs(folder) if folder is not None else None
    except OSError:
        logs = None
    return [*log.files, *(path for path in (logs.captures if logs is not None else []) if path not in log.files)]


def _matches(path: Path) -> Iterator[tuple[int, str, str]]:
    """Number, text and kind of each line that tells something."""
    before = 0
    try:
        for lines, _ in LineFile(path).blocks():
            text = "\n".join(lines)
            likely = {name: telling for name, telling in TELLING.items() if any(word in text for word in telling.words)}
            for number, line in enumerate(lines if likely else (), before + 1):
                name = _kind(line, likely)
                if name is not None:
                    yield number, line, name
            before += len(lines)
    except OSError as error:
        raise BevctlError(f"{path} cannot be read: {error.strerror or error}.") from error


def _kind(line: str, likely: Mapping[str, Telling]) -> str | None:
    """The first of `likely` that the line is."""
    for name, telling in likely.items():
        if any(word in line for word in telling.words) and re.search(telling.pattern, line):
            return name
    return None
