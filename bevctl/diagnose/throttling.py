"""GPUs whose clock heat or power holds back now, while they train: then no number format is as fast as it could be."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from bevctl.config.load import from_dict
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.finding import CheckStatus, Evidence, Severity
from bevctl.monitor.view import View
from bevctl.preflight.gpu_health import throttling
from bevctl.preflight.nvml import POWER_CAP, SLOWDOWNS
from bevctl.preflight.request import context_of_config

HELD_BACK = "SPEED109"


def is_here(view: View) -> bool:
    """Whether the run trains on this machine now."""
    return view.state.name == "running" and view.log.header.get("host") == socket.gethostname()


def held_back(document: Mapping[str, Any]) -> Iterator[DiagnoseFinding]:
    """What the GPUs of a resolved config say of their clocks; nothing where they run as they can, or none is there."""
    told = throttling(context_of_config(from_dict(document)))
    capped = told.status is CheckStatus.PASS and SLOWDOWNS[POWER_CAP] in told.found
    if told.status is not CheckStatus.WARN and not capped:
        return
    yield DiagnoseFinding(
        HELD_BACK,
        Severity.INFO if capped else Severity.WARN,
        0.7,
        "The GPU's clock is held back by its power limit"
        if capped
        else "The GPU's clock is held back by heat or power",
        (Evidence("GPUs now", told.found),),
        "A lower clock slows every kernel down; work that moves data, as most of half precision does, loses less.",
        (Remedy({}, told.fix),) if told.fix else (),
    )
