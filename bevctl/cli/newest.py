"""The run that a command means when none is named."""

from __future__ import annotations

from pathlib import Path

from bevctl.console import Console
from bevctl.errors import BevctlError

RUNS = Path("runs")


def newest_run(console: Console) -> Path:
    """The newest run below runs/, said on stderr. Raises BevctlError where there is none."""
    from bevctl.runs.source import newest_run as newest_below

    found = newest_below(RUNS)
    if found is None:
        raise BevctlError(f"No run is below {RUNS}/ here.", "Name a run's folder or a log.")
    console.info(f"No run given: taking the newest, {found}")
    return found
