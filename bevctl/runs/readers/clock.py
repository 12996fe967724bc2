"""Clock times in log lines, as fast as reading them allows: one conversion an hour of log, the rest is addition."""

from __future__ import annotations

import re
import time

STAMP = re.compile(r"(?:(\d{4})[-/])?(\d\d)[-/](\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?", re.ASCII)
"""A time as loggers write it, in local time; without a year on some consoles."""
_DAY_S = 86400.0


class Clock:
    """Turns stamps into Unix times.

    Args:
        reference: a moment that no line is later than (the file's mtime): gives the year where a stamp has none.
    """

    def __init__(self, reference: float | None) -> None:
        self._reference = time.time() if reference is None else reference
        self._hours: dict[str, float] = {}

    def time(self, stamp: str) -> float | None:
        """Unix time of a text that STAMP matches whole; None where there is no such moment."""
        hour = self._hours.get(stamp[:13])
        if hour is None:
            return self._parse(stamp)
        return hour + int(stamp[14:16]) * 60 + float(stamp[17:].replace(",", "."))

    def _parse(self, text: str) -> float | None:
        match = STAMP.match(text)
        if match is None:
            return None
        year, month, day, hour, minute, second, fraction = match.groups()
        start = self._hour(int(year) if year else None, int(month), int(day), int(hour))
        if start is None:
            return None
        if year:
            if len(self._hours) > 10_000:
                self._hours.clear()
            self._hours[text[:13]] = start
        return start + int(minute) * 60 + int(second) + (float(f"0.{fraction}") if fraction else 0.0)

    def _hour(self, year: int | None, month: int, day: int, hour: int) -> float | None:
        if not (1 <= month <= 12 and 1 <= day <= 31 and hour <= 24):
            return None
        try:
            if year is not None:
                return time.mktime((year, month, day, hour, 0, 0, 0, 0, -1))
            this_year = time.localtime(self._reference).tm_year
            moment = time.mktime((this_year, month, day, hour, 0, 0, 0, 0, -1))
            if moment > self._reference + _DAY_S:
                moment = time.mktime((this_year - 1, month, day, hour, 0, 0, 0, 0, -1))
            return moment
        except (OverflowError, ValueError, OSError):
            return None
