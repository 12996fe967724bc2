"""What the last words of the ranks say of a hang: where each one stands, and which one the others wait for."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from bevctl.diagnose.report import Remedy, Table
from bevctl.finding import Evidence
from bevctl.monitor.state import span
from bevctl.runs.records import Beat, Doing


@dataclass(frozen=True)
class Culprit:
    """The ranks that the others wait for."""

    title: str
    fix: tuple[Remedy, ...]


def culprit(beats: Sequence[Beat], now: float) -> Culprit | None:
    """Ranks that are gone or left, else those that are behind; None where all are alike."""
    gone = [beat for beat in beats if _is_gone(beat)]
    left = [beat for beat in beats if beat.doing is Doing.LEFT]
    least = min((beat.turn for beat in beats), default=0)
    found = gone or left or [beat for beat in beats if beat.turn == least]
    others = [beat for beat in beats if beat not in found]
    if not others:
        return None
    first, *rest = _groups(found)
    told = f"{names(first)} {'is gone' if len(first) == 1 else 'are gone'}; last word: " if gone else f"{names(first)} "
    said = [told + _said(first, now), *(f"{names(group)} too" for group in rest), _of_the_others(others)]
    return Culprit("; ".join(said), (_remedy(first[0], is_absent=bool(gone or left)),))


def standing(beats: Sequence[Beat], now: float) -> str:
    """Where the ranks stand, in a phrase."""
    return "; ".join(f"{names(group)} {_said(group, now)}" for group in _groups(beats))


def last_words(beats: Sequence[Beat], now: float) -> tuple[Evidence, ...]:
    """One line for all ranks that are at the same place, those behind first."""
    return tuple(Evidence(names(group), _said(group, now)) for group in _groups(beats))


def names(beats: Sequence[Beat]) -> str:
    """The ranks in a few words: `rank 3`, `ranks 0-2, 4`."""
    ranks = sorted(beat.rank for beat in beats)
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    told = ", ".join("-".join(map(str, ends)) for ends in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {told}"


def table(beats: Sequence[Beat], now: float) -> Table:
    """The last step of each rank."""
    rows = [
        (beat.rank, beat.iteration, beat.doing.value, round(max(now - beat.time, 0.0)), beat.host, str(beat.pid))
        for beat in beats
    ]
    return Table("ranks", "Last step of each rank", ("rank", "iteration", "doing", "seconds", "host", "pid"), rows)


def _groups(beats: Sequence[Beat]) -> list[list[Beat]]:
    """Beats by place, in the order in which ranks come there."""
    groups: dict[tuple[int, str, int], list[Beat]] = {}
    for beat in beats:
        groups.setdefault((beat.turn, beat.doing.value, beat.iteration), []).append(beat)
    return [groups[place] for place in sorted(groups)]


def _said(group: Sequence[Beat], now: float) -> str:
    """What these ranks do, which are at the same place, and for how long all of them have."""
    one = group[0]
    told = " ".join(filter(None, (one.doing.value if len(group) == 1 else one.doing.plural, one.place)))
    long = span(max(now - max(beat.time for beat in group), 0.0))
    return f"{told}, {long} ago" if one.doing is Doing.LEFT else f"{told} for {long}"


def _of_the_others(others: Sequence[Beat]) -> str:
    groups = _groups(others)
    if len(groups) > 1:
        return "the others are further"
    one = others[0]
    named, does = (names(others), one.doing.value) if len(others) == 1 else ("the others", one.doing.plural)
    return " ".join(filter(None, (named, does, one.place)))


def _is_gone(beat: Beat) -> bool:
    """Whether the rank was on this machine, and its process no longer exists."""
    return beat.doing is not Doing.LEFT and beat.host == socket.gethostname() and not psutil.pid_exists(beat.pid)


def _remedy(beat: Beat, is_absent: bool) -> Remedy:
    """Where to look for what keeps a rank."""
    if is_absent:
        told = "look at its own output for an exception, at dmesg for a process killed for memory; resume the run"
    elif beat.doing is Doing.DATA:
        told = "look at its loading processes and its storage (state D in ps, a mount that does not answer)"
    else:
        told = f"`py-spy dump --pid {beat.pid}` (pip install py-spy) says in which line it stands"
    return Remedy({}, f"on {beat.host}: {told}")
