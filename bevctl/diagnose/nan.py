"""Numbers that are not finite: from the recorded incident, by running its step again."""

from __future__ import annotations

from bevctl.diagnose.report import DiagnoseRequest, Diagnosis, Status


def diagnose(request: DiagnoseRequest) -> Diagnosis:
    """Why a run met numbers that are not finite.

    Raises:
        BevctlError: the run cannot be read, or holds no incident to replay.
    """
    return Diagnosis(Status.INCONCLUSIVE, looked_at=[f"{request.run}"])
