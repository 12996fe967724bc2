"""Whether a run is running, stalled, finished, died or just ended, and how that can be told."""

from __future__ import annotations

import datetime
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bevctl.monitor.progress import Progress, evaluation_lengths
from bevctl.runs.records import Doing, EventRecord, RunLog

DAY_S = 86400.0
LEAST_SILENCE_S = 60.0
"""A pause that no run is called stalled for."""
USUAL_LINES = 10
"""Usual distances between two lines after which silence is a stall."""
UNKNOWN_EVALUATION_S = 3600.0
"""How long an evaluation may take where the log shows none that ended."""
STARTING_S = 1800.0
"""How long a run may take to its first record."""
_STAMP = re.compile(r"(20\d{6})_(\d{6})")


@dataclass(frozen=True)
class State:
    """What has become of a run."""

    name: str
    """running, stalled, finished, died or ended."""
    why: str
    """One sentence."""
    silence_s: float | None = None
    """Time since the last line."""
    limit_s: float | None = None
    """Silence after which the run counts as stalled."""
    failure: EventRecord | None = None
    """What it died of."""


def state_of(log: RunLog, progress: Progress, now: float, grew: bool = False) -> State:
    """The state at Unix time `now`; `grew` says that the log was seen to grow."""
    failure = _last_words(log)
    ending = _told(log, failure) or _completed(log, progress)
    if ending is not None:
        return ending
    if failure is not None:
        return State("died", failure.message, failure=failure)
    last = _last_line_time(log)
    if last is None:
        return State("ended", f"{_position(progress)}; the log has no clock times")
    silence, limit = max(now - last, 0.0), silence_limit(log, progress)
    if silence <= limit:
        return State("running", f"last line {span(silence)} ago", silence, limit)
    if grew or (silence < DAY_S and _is_live(log)):
        return State("stalled", f"no line for {span(silence)}; {span(limit)} would be usual", silence, limit)
    return State("ended", f"{_position(progress)}, {span(silence)} ago, without saying why", silence, limit)


def span(seconds: float) -> str:
    """A length of time as one reads it: 45 s, 12 min, 3 h 20 min, 5 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours / 24:.0f} days"


def _position(progress: Progress) -> str:
    if progress.iter is None:
        return "stopped before its first training record"
    of = f" of {progress.total_iters}" if progress.total_iters else ""
    return f"stopped at iteration {progress.iter}{of}"


def _last_words(log: RunLog) -> EventRecord | None:
    """The first cause among the failures after which no training record comes."""
    last = log.steps[-1].iter if log.steps else None
    final = [e for e in log.events if e.kind == "failure" and (last is None or e.iter is None or e.iter >= last)]
    return next((event for event in final if event.data.get("first_cause")), final[0] if final else None)


def _told(log: RunLog, failure: EventRecord | None) -> State | None:
    """What a run of bevctl, or one that bevctl has launched, says of its own end."""
    is_launched = "launched" in log.header
    meta: dict[str, Any] = log.header.get("launched") or log.header.get("meta") or {}
    status = meta.get("status") if log.format == "bevctl" or is_launched else None
    ends = [event.message for event in log.events if event.kind == "end"]
    message = ends[-1] if ends else f"its run.json says {status}"
    message = _end_of_launched(log, failure) if is_launched else message
    if status == "finished":
        return State("finished", message)
    if status == "preempted":
        return State("ended", f"was preempted: {message}; a checkpoint was written")
    if status in ("failed", "nonfinite"):
        return State("died", message, failure=failure)
    if status == "running" and _is_gone(meta):
        return State("died", f"process {meta['pid']} is gone and wrote no end", failure=failure)
    return None


def _end_of_launched(log: RunLog, failure: EventRecord | None) -> str:
    """How the program of another project ended, in the words of its log or of bevctl, which started it."""
    launched: dict[str, Any] = log.header["launched"]
    if launched.get("status") == "preempted":
        return "stopped by a signal"
    ends = [segment.get("exit") for segment in launched["segments"] if isinstance(segment, dict)]
    return failure.message if failure else f"its program ended with exit code {ends[-1] if ends else 'unknown'}"


def _is_gone(meta: dict[str, Any]) -> bool:
    """Whether the run's process was on this machine and no longer exists."""
    pid = meta.get("pid")
    if not isinstance(pid, int) or pid <= 0 or meta.get("host") != socket.gethostname():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _completed(log: RunLog, progress: Progress) -> State | None:
    """Finished: the last record is within one interval of the end."""
    if any(event.kind == "end" for event in log.events[-3:]) and log.format != "bevctl":
        return State("finished", next(event.message for event in reversed(log.events) if event.kind == "end"))
    if progress.total_iters is None or progress.iter is None:
        return None
    if progress.total_iters - progress.iter >= max(log.interval or 1, 1):
        return None
    return State("finished", f"all {progress.total_iters} iterations are done")


def _last_line_time(log: RunLog) -> float | None:
    """Clock of the last line; where the log has none, when the file was last written."""
    times = [event.time for event in log.events[-1:]] + [step.time for step in log.steps[-1:]] + [log.last_time]
    known = [time for time in times if time is not None]
    return max(known) if known else log.modified


def silence_limit(log: RunLog, progress: Progress) -> float:
    """Seconds without a line after which a run is stalled rather than busy."""
    if not log.steps:
        return STARTING_S
    usual = (progress.iter_time_s or 0.0) * (log.interval or 1)
    limit = max(LEAST_SILENCE_S, USUAL_LINES * usual)
    if is_evaluating(log, progress):
        known = evaluation_lengths(log)
        return max(limit, 3 * max(known) if known else UNKNOWN_EVALUATION_S)
    return limit


def is_evaluating(log: RunLog, progress: Progress) -> bool:
    """Whether the run saves or evaluates, by its ranks or because it saved or ended an epoch last.

    An evaluation writes nothing for long.
    """
    if log.beats:
        return any(beat.doing in (Doing.SAVES, Doing.EVALUATES) for beat in log.beats)
    last = log.steps[-1]
    since = kinds_since(log, last.iter)
    if any(v.iter is not None and v.iter >= last.iter for v in log.validations):
        return False
    at_end = bool(progress.iters_per_epoch) and last.iter % (progress.iters_per_epoch or 1) == 0
    return at_end or "checkpoint" in since or "Saving checkpoint" in log.last_line


def kinds_since(log: RunLog, iteration: int) -> list[str]:
    """Kinds of the events that belong to this iteration or a later one.

    A checkpoint that is written while training goes on says itself of which iteration it is.
    """
    told = ((event.kind, event.data.get("iteration", event.iter)) for event in log.events)
    return [kind for kind, at in told if isinstance(at, int) and at >= iteration]


def _is_live(log: RunLog) -> bool:
    """Whether the file's own time can be believed to be that of its last line.

    A log without clock times may be a copy, whose mtime says nothing; it is believed where the date that its path
    holds, plus the time its iterations took, leads to its mtime.
    """
    if not log.time_estimated:
        return True
    stamps = [moment for path in log.files for moment in _stamps(path.parts)]
    first = log.steps[0].time if log.steps else log.modified
    return first is not None and any(abs(first - stamp) < DAY_S for stamp in stamps)


def _stamps(parts: Sequence[str]) -> list[float]:
    """Unix times of YYYYMMDD_HHMMSS in the names of a path."""
    found = []
    for day, clock in (match for part in parts for match in _STAMP.findall(part)):
        try:
            found.append(datetime.datetime.strptime(day + clock, "%Y%m%d%H%M%S").timestamp())
        except ValueError:
            continue
    return found
