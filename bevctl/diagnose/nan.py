"""Numbers that are not finite: from the recorded incident, by running its step again; without one, from the log."""

from __future__ import annotations

import dataclasses

from bevctl.diagnose.report import DiagnoseRequest, Diagnosis
from bevctl.errors import BevctlError


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Why a run met numbers that are not finite.

    Raises:
        BevctlError: the run cannot be read, or holds no incident to replay.
    """
    if request.forecast:
        from bevctl.diagnose.nan_forecast import diagnose_forecast

        return diagnose_forecast(request)
    if not request.replay:
        return _from_files(request)
    if request.run is None:
        raise BevctlError("--replay needs a run.", "Name the folder of a run, or one below its incident/.")
    from bevctl.diagnose.replay import diagnose_replay

    return diagnose_replay(request)


def _from_files(request: DiagnoseRequest) -> Diagnosis:
    """What the files tell, and that a replay would tell more."""
    from bevctl.diagnose import nan_log
    from bevctl.engine.incident import find_incidents

    answer = nan_log.diagnose(request)
    incidents = find_incidents(request.run) if request.run is not None else []
    if not incidents:
        return answer
    names = ", ".join(path.name for path in incidents)
    note = (
        f"Steps that were not finite are recorded (iteration {names}): --replay finds the operation, and what cures it."
    )
    return dataclasses.replace(answer, looked_at=(*answer.looked_at, note))
