"""The part of a run that one looks at: from one moment to another."""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass

from bevctl.errors import BevctlError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?\s*[smhdw]\s*)+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.ASCII)
_CLOCK = re.compile(r"(\d\d):(\d\d)(?::(\d\d))?", re.ASCII)
_UNIX = re.compile(r"\d{9,11}(?:\.\d+)?", re.ASCII)


@dataclass(frozen=True)
class Window:
    """Unix times, s, both included; None leaves a side open."""

    since: float | None = None
    until: float | None = None

    @property
    def is_open(self) -> bool:
        return self.since is None and self.until is None

    def holds(self, time: float | None) -> bool:
        """Whether `time` is inside; something without a time is."""
        if time is None:
            return True
        return (self.since is None or time >= self.since) and (self.until is None or time <= self.until)


def parse_duration(text: str) -> float | None:
    """Seconds of `90s`, `30m`, `1h`, `2d`, `1h30m`; None where `text` is none of these."""
    text = text.strip().lower()
    if not _DURATION.fullmatch(text):
        return None
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    return seconds if math.isfinite(seconds) else None


def parse_moment(text: str, now: float) -> float:
    """Unix time that `text` means: a duration before `now`, or a timestamp (local time where it names no zone).

    Takes `90s 30m 1h 2d`, ISO dates and times, `HH:MM[:SS]` (the last such moment before `now`) and Unix seconds.

    Raises:
        BevctlError: it is none of these.
    """
    seconds = parse_duration(text)
    if seconds is not None:
        return now - seconds
    if _UNIX.fullmatch(text.strip()):
        return float(text)
    moment = _clock_time(text.strip(), now)
    if moment is None:
        moment = _timestamp(text.strip())
    if moment is None:
        raise BevctlError(
            f"{text!r} is neither a duration nor a time.",
            "Give 90s, 30m, 1h, 2d or a timestamp such as 2026-02-03T04:05:06.",
        )
    return moment


def _clock_time(text: str, now: float) -> float | None:
    match = _CLOCK.fullmatch(text)
    if match is None:
        return None
    hour, minute, second = (int(part or 0) for part in match.groups())
    if hour > 23 or minute > 59 or second > 59:
        return None
    moment = datetime.datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=second, microsecond=0)
    return (moment if moment.timestamp() <= now else moment - datetime.timedelta(days=1)).timestamp()


def _timestamp(text: str) -> float | None:
    iso = text.replace("/", "-").replace(",", ".")
    if iso.endswith(("Z", "z")):  # Python 3.10's fromisoformat does not know it
        iso = f"{iso[:-1]}+00:00"
    try:
        return datetime.datetime.fromisoformat(iso).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
