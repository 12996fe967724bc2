"""What the ranks of a run say of a hang: one that cannot run, and one that stands elsewhere than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import psutil

from bevctl.diagnose.rank_beats import culprit, last_words, standing
from bevctl.diagnose.rank_processes import COLLECTIVE, RankProcess, top
from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.finding import Evidence, Severity
from bevctl.runs.records import Beat, Doing

CANNOT_RUN, STANDING = "HANG103", "HANG104"
DEAD_WORKER = "resume from the last checkpoint; `bevctl diagnose oom` tells of processes killed for memory"


def cannot_run(processes: Sequence[RankProcess], last_words: Sequence[Evidence] = ()) -> Iterator[DiagnoseFinding]:
    """Processes that are stopped, dead or stuck in the kernel, and loading processes that are.

    Args:
        last_words: of the ranks, as further evidence.
    """
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
            0.95 if any(p.is_halted or p.bad_workers for p in processes) else 0.7,  # a rank may write at this moment
            f"{evidence[0].where}: {evidence[0].what}",
            (*evidence, *last_words),
            "A process that does not run keeps every other rank waiting.",
            tuple(Remedy({}, fix) for fix in dict.fromkeys(fixes)),
        )


def where_they_stand(
    processes: Sequence[RankProcess], beats: Sequence[Beat], now: float, is_live: bool
) -> Iterator[DiagnoseFinding]:
    """Where the ranks of a silent run stand, by their last words and their stacks; the one elsewhere is the culprit.

    Args:
        is_live: the run is known to hang, and not only to have ended somehow.
    """
    seen = [process for process in processes if process.stack]
    told = [] if all(beat.doing is Doing.LEFT for beat in beats) else list(beats)
    behind = culprit(told, now)
    apart, usual = _apart(seen)
    if behind is not None:
        title, sure = behind.title, 0.95
    elif apart:
        title, sure = f"{', '.join(p.name for p in apart)}: {_at(apart[0])}, while the others are alike: {usual}", 0.9
    elif told:
        title, sure = standing(told, now) + (f" (stacks: {usual})" if usual is not None else ""), 0.6
    elif seen:
        is_shared = usual is not None and len(seen) > 1
        each = "; ".join(f"{process.name}: {_at(process)}" for process in seen)
        title, sure = f"All {len(seen)} ranks are alike: {usual}" if is_shared else each, 0.6
    else:
        return
    bad = Severity.FAIL if behind is not None else Severity.WARN
    yield DiagnoseFinding(
        STANDING,
        bad if is_live else Severity.INFO,
        sure,
        title,
        (*last_words(told, now), *(Evidence(process.name, top(process)) for process in seen)),
        "What it stands in is what the run waits for.",
        behind.fix if behind is not None else (),
    )


def _at(process: RankProcess) -> str:
    return process.doing or process.stack[0]


def _apart(seen: Sequence[RankProcess]) -> tuple[list[RankProcess], str | None]:
    """The ranks that stand elsewhere than the others, and where those are; None where that cannot be told."""
    usual = _usual([_at(process) for process in seen]) if seen else None
    return [process for process in seen if usual is not None and _at(process) != usual], usual


def _usual(doings: Sequence[str]) -> str | None:
    """What the ranks do that wait for another one; None where that cannot be told."""
    if COLLECTIVE in doings:
        return COLLECTIVE
    name, count = Counter(doings).most_common(1)[0]
    return name if 2 * count > len(doings) else None
