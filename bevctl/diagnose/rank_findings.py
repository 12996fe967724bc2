"""What the processes of a run say of a hang: one that cannot run, and one that stands elsewhere than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import psutil

from bevctl.diagnose.rank_processes import COLLECTIVE, RankProcess, top
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.finding import Evidence, Severity

CANNOT_RUN, STACKS = "HANG103", "HANG104"
DEAD_WORKER = "resume from the last checkpoint; `bevctl diagnose oom` tells of processes killed for memory"


def cannot_run(processes: Sequence[RankProcess]) -> Iterator[DiagnoseFinding]:
    """Processes that are stopped, dead or stuck in the kernel, and loading processes that are."""
    evidence, fixes = [], []
    for process in processes:
        if process.status == psutil.STATUS_STOPPED:
            evidence.append(Evidence(process.name, "stopped by a signal (SIGSTOP, SIGTSTP)"))
            fixes.append(f"kill -CONT {process.pid}")
        elif process.status == psutil.STATUS_ZOMBIE:
            evidence.append(Evidence(process.name, "dead, and its parent has not collected it"))
            fixes.append("end the run's other processes and resume it")
        elif process.status == psutil.STATUS_DISK_SLEEP:
            evidence.append(Evidence(process.name, "waits in the kernel for a device (state D)"))
            fixes.append("look at the storage: a mount that does not answer")
        for pid, status in process.bad_workers:
            stopped = status == psutil.STATUS_STOPPED
            told = "stopped by a signal" if stopped else "dead"
            evidence.append(Evidence(process.name, f"loading process {pid} is {told}"))
            fixes.append(f"kill -CONT {pid}" if stopped else DEAD_WORKER)
    if evidence:
        yield DiagnoseFinding(
            CANNOT_RUN,
            Severity.FAIL,
            0.95,
            f"{evidence[0].where}: {evidence[0].what}",
            tuple(evidence),
            "A process that does not run keeps every other rank waiting.",
            tuple(Remedy({}, fix) for fix in dict.fromkeys(fixes)),
        )


def stacks(processes: Sequence[RankProcess], silent: bool) -> Iterator[DiagnoseFinding]:
    """Where the ranks stand; one that stands elsewhere than the others is the culprit."""
    seen = [process for process in processes if process.stack]
    if not seen or not silent:
        return
    doings = {process.pid: process.doing or process.stack[0] for process in seen}
    usual = _usual(list(doings.values()))
    apart = [process for process in seen if usual is not None and doings[process.pid] != usual]
    if apart:
        named = ", ".join(process.name for process in apart)
        title, sure = f"{named}: {doings[apart[0].pid]}, while the others are alike: {usual}", 0.9
    elif usual is not None and len(seen) > 1:
        title, sure = f"All {len(seen)} ranks are alike: {usual}", 0.6
    else:
        title, sure = "; ".join(f"{process.name}: {doings[process.pid]}" for process in seen), 0.6
    yield DiagnoseFinding(
        STACKS,
        Severity.WARN,
        sure,
        title,
        tuple(Evidence(process.name, top(process)) for process in seen),
        "What it stands in is what the run waits for.",
    )


def _usual(doings: Sequence[str]) -> str | None:
    """What the ranks do that wait for another one; None where that cannot be told."""
    if COLLECTIVE in doings:
        return COLLECTIVE
    name, count = Counter(doings).most_common(1)[0]
    return name if 2 * count > len(doings) else None
