"""The table of topics: what `bevctl diagnose` can be asked, and which module answers."""

from __future__ import annotations

import importlib

from bevctl.diagnose.report import DiagnoseRequest, Diagnosis

TOPICS: dict[str, tuple[str, str]] = {
    "nan": ("bevctl.diagnose.nan", "Numbers that are not finite: which operation, which sample, why, what cures it."),
    "unstable-loss": (
        "bevctl.diagnose.unstable_loss",
        "A loss that jumps, rises, swings or diverges while it is a number.",
    ),
    "fp16-inactive": ("bevctl.diagnose.fp16_inactive", "FP16 without effect, or whose saving is a lost head."),
    "accuracy-drop": (
        "bevctl.diagnose.accuracy_drop",
        "Half precision that scores lower: how much, in which class, since when, which part.",
    ),
    "oom": ("bevctl.diagnose.oom", "Memory that ran out, of the GPU or the host: what held it, and what to turn down."),
    "no-speedup": (
        "bevctl.diagnose.no_speedup",
        "Half precision that is no faster: where the time goes, and how much there is to gain.",
    ),
    "hang": ("bevctl.diagnose.hang", "A run that is silent: stalled or dead, which rank waits for what."),
}
"""Name → (module with `diagnose`, one line of help). A module is imported when its topic is asked for."""


def diagnose(topic: str, request: DiagnoseRequest) -> Diagnosis:
    """The answer of a topic of TOPICS. Raises BevctlError for input that cannot be worked with."""
    answer: Diagnosis = importlib.import_module(TOPICS[topic][0]).diagnose(request)
    return answer
